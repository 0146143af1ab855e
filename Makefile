# The front door. Every target is one script; the scripts hold the logic and say what they do.

.PHONY: demo test test-all setup native android lint docs clean

demo:      ## set up, then the main job end to end on a real small model
	scripts/demo
test:      ## set up, then every test except the slow ones
	scripts/test
test-all:  ## the slow checks too, each with its stated time
	scripts/test-all
setup:     ## a working environment in .venv
	scripts/setup
native:    ## build the engine and install it into toolkit/mkdeploy/_native
	scripts/build-native release
android:   ## cross-build the phone's engine: static aarch64 programs (about 10 minutes the first time)
	scripts/build-android
lint:      ## ruff, mypy, shellcheck
	scripts/lint
docs:      ## regenerate docs/cli.md from the code
	.venv/bin/python scripts/gen-cli-docs
clean:     ## remove everything that setup and the builds made (the download cache stays)
	rm -rf .venv build toolkit/mkdeploy/_native toolkit/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
