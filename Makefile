# `make demo` and `make test` need python3 (3.11 or newer, with venv), make and a compiler; all else goes into .venv.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

# Tests of the remote tiers start a redis-server, those of the web page a chromium (apt-get install redis-server
# chromium); they are skipped without.
.PHONY: help demo test test-all test-slow test-device test-vllm test-vllm-slow test-sglang test-llamacpp models lint format bench bench-peers bench-servers bench-remote docs figures clean

help:
	@echo "make demo    cold, warm and restarted answers of a real model, with times"
	@echo "make test    the test suite but for what takes long"
	@echo "make test-all     the same, and then test-slow and test-device"
	@echo "make test-slow    what takes long: real models through every tier, programs that are killed, many clients at once"
	@echo "make test-device  what runs a model once more, with KV on a device that does everything as late as it may"
	@echo "make test-vllm  the connector under a real vLLM on CPU, in an environment of its own"
	@echo "make test-vllm-slow  adapters, metrics and tensor parallel ranks under it, after that"
	@echo "make test-sglang  the HiCache backend against SGLang's own interface"
	@echo "make test-llamacpp  the cache under a real llama-cpp-python, which is compiled first (minutes)"
	@echo "make models  run every model class and write docs/models.md anew (minutes)"
	@echo "make lint    ruff, mypy --strict, import-linter"
	@echo "make format  let ruff rewrite what it can"
	@echo "make bench   time to first token: cold, from RAM, from disk, and the floor"
	@echo "make bench-remote  the same from Redis and S3 (needs redis-server)"
	@echo "make bench-peers  the same beside transformers, vLLM and llama.cpp, each in an environment of its own"
	@echo "make bench-servers  many clients on one prefix, beside vLLM's and llama.cpp's servers"
	@echo "make docs    the manual, in build/manual"
	@echo "make figures fill the numbers of README.md and docs/benchmarks.md in from benchmarks/results"
	@echo "make clean   remove .venv and caches"

demo: .venv/.installed-demo
	$(BIN)/keepwarm demo $(ARGS)

test: .venv/.installed-dev
	$(PYTEST) -m "not slow" $(ARGS)

test-all: test test-slow test-device

test-slow: .venv/.installed-dev
	$(PYTEST) -m slow --ignore tests/vllm $(ARGS)

test-device: .venv/.installed-dev
	$(PYTEST) --device adversarial $(addprefix tests/,engine batching pipeline runtime sessions toolsets) $(ARGS)

# In vLLM's own environment, which pins other versions than ours: minutes and some gigabytes the first time.
test-vllm: .venv/.installed-demo
	mkdir -p .peers
	$(BIN)/python benchmarks/peers/environments.py vllm .peers pytest xxhash redis obstore 'moto[s3]' flask flask-cors
	PYTHONPATH=src:. .peers/vllm/bin/python -m pytest tests/vllm -m "not slow" $(ARGS)

# Adapters, metrics, tensor parallel ranks: some minutes more. After test-vllm.
test-vllm-slow:
	PYTHONPATH=src:. .peers/vllm/bin/python -m pytest tests/vllm -m slow $(ARGS)

# SGLang's own storage interface, from its wheel: the rest of SGLang needs CUDA.
test-sglang: .venv/.installed-dev
	mkdir -p .peers
	$(BIN)/python benchmarks/peers/environments.py sglang .peers
	$(BIN)/python -m pytest tests/sglang $(ARGS)

# In an environment without torch, which the cache does not need.
test-llamacpp: .venv/.installed-demo
	mkdir -p .peers
	if command -v c++ >/dev/null; then \
	    $(BIN)/python benchmarks/peers/environments.py llamacpp .peers pytest hypothesis gguf pydantic xxhash cryptography && \
	    PYTHONPATH=src:. .peers/llamacpp/bin/python -m pytest tests/llamacpp --confcutdir tests/llamacpp $(ARGS); \
	else echo "skipped: llama-cpp-python is compiled, and there is no C++ compiler (apt install g++)"; fi

# ARGS names model types, or is --render: the page alone, from docs/models.json.
models: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.families.table $(ARGS)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.installed-dev
	$(BIN)/python benchmarks/ttft.py $(ARGS)

bench-remote: .venv/.installed-dev
	$(BIN)/python benchmarks/remote.py $(ARGS)

bench-peers: .venv/.installed-demo
	$(BIN)/python benchmarks/peers/run.py $(ARGS)

bench-servers: .venv/.installed-dev
	$(BIN)/python benchmarks/peers/servers.py $(ARGS)

# Every warning is an error: a link to nothing, a page that no menu names. PYTHONPATH: the pages that are made.
docs: .venv/.installed-docs
	PYTHONPATH=. $(BIN)/mkdocs build --strict $(ARGS)

figures: .venv/.installed-demo
	$(BIN)/python -m tools.figures

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist src/*.egg-info

# torch goes first, so that the pinned build is in place when other packages ask for any torch.
.venv/.installed-demo: $(INPUTS) | $(BIN)/python
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e .
	touch $@

.venv/.installed-dev: $(INPUTS) | $(BIN)/python
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	$(PIP) install -c constraints.txt --no-deps bfcl-eval
	touch $@ .venv/.installed-demo

.venv/.installed-docs: $(INPUTS) | $(BIN)/python
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[docs]'
	touch $@ .venv/.installed-demo

$(BIN)/python:
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "no virtual environment: apt install python3-venv" >&2; exit 1; }
