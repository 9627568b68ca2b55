"""A CPU platform for vLLM-Omni, which has none: for trying things out and for tests, not for speed.

It stands in only where nothing else is there: vLLM is a CPU build, and none of vLLM-Omni's own platforms
and no other plugin claims the machine. Where vLLM or vLLM-Omni is not what it expects, it stays away and says
so in one warning.
"""

import logging
from collections.abc import Callable
from importlib.metadata import entry_points

from rowseed.vllm_omni import releases

logger = logging.getLogger("vllm.rowseed")


def platform_plugin() -> str | None:
    """The platform's qualified name, or None where an accelerator or another platform plugin exists.

    Entry point of the group `vllm_omni.platform_plugins`; runs once or twice a process. Raises nothing.
    """
    try:
        return _qualified_name() if _is_free() else None
    except (Exception, SystemExit) as error:  # an import may raise anything
        release = releases.describe(releases.installed())
        reason = f"{type(error).__name__}: {error}"
        logger.warning("rowseed's CPU platform is not there for %s: %s", release, reason)
        return None


def _qualified_name() -> str:
    from rowseed.vllm_omni.platforms.cpu_platform import CpuOmniPlatform

    CpuOmniPlatform()  # as vLLM-Omni will, and without a guard
    return f"{CpuOmniPlatform.__module__}.{CpuOmniPlatform.__name__}"


def _is_free() -> bool:
    from vllm import envs, platforms
    from vllm_omni.platforms import builtin_omni_platform_plugins
    from vllm_omni.plugins import OMNI_PLATFORM_PLUGINS_GROUP

    if not platforms.current_platform.is_cpu():
        return False
    plugins = list(builtin_omni_platform_plugins.values())
    for point in entry_points(group=OMNI_PLATFORM_PLUGINS_GROUP):
        allowed = envs.VLLM_PLUGINS is None or point.name in envs.VLLM_PLUGINS
        if allowed and point.value != f"{__name__}:{platform_plugin.__name__}":
            plugins.append(lambda point=point: point.load()())
    return not any(_claims_machine(plugin) for plugin in plugins)


def _claims_machine(plugin: Callable[[], str | None]) -> bool:
    # vLLM-Omni takes a plugin that raises for one that is not there; so do we.
    try:
        return plugin() is not None
    except Exception:
        return False
