.PHONY: setup test
