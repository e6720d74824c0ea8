# `make demo` and `make test` need python3 (3.11 or newer, with venv), make and a compiler; all else goes into .venv.
# TORCH=cuda: torch is not its build for the CPU, even where no NVIDIA GPU is seen.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
# tools/install.py leaves packages uncompiled. Where this is set, every process would compile torch again: seconds each.
export PYTHONDONTWRITEBYTECODE :=

# Tests of the remote tiers start a redis-server, those of the web page a chromium (apt-get install redis-server
# chromium); they are skipped without.
.PHONY: help demo test test-all test-slow test-device test-vllm test-vllm-slow test-sglang test-llamacpp test-llamaserver test-mlx test-triton test-router test-clients models lint format bench bench-all bench-peers bench-servers bench-remote gpu gpu-pack docs figures clean

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
	@echo "make test-mlx  the prompt cache under a real mlx-lm, with MLX's build for the CPU"
	@echo "make test-triton  the kernels for GPUs under Triton's interpreter (ARGS=\"-m slow\": longer tests, and compiled for GPUs)"
	@echo "make test-llamaserver  keepwarm slots with a real llama-server, which is compiled first (minutes)"
	@echo "make test-router  replicas behind vLLM's own router, from its package index"
	@echo "make test-clients  real agents and SDKs, from their package indexes, against a server with a real model (minutes)"
	@echo "make models  run every model class and write docs/models.md anew (minutes)"
	@echo "make lint    ruff, mypy --strict, import-linter"
	@echo "make format  let ruff rewrite what it can"
	@echo "make bench   time to first token: cold, from RAM, from disk, and the floor"
	@echo "make bench-all  every figure of README.md and the manual, in under three hours; goes on where it stopped"
	@echo "make bench-remote  the same from Redis and S3 (needs redis-server)"
	@echo "make bench-peers  the same beside transformers, vLLM and llama.cpp, each in an environment of its own"
	@echo "make bench-servers  many clients on one prefix, beside vLLM's and llama.cpp's servers"
	@echo "make gpu     acceptance on a GPU: equal to the bit, then times (PYTHON names the interpreter with torch)"
	@echo "make gpu-pack  what make gpu needs on a machine without a network, as build/keepwarm-gpu.tar.gz"
	@echo "make docs    the manual, in build/manual"
	@echo "make figures fill the numbers of README.md and the manual in from benchmarks/results, and draw the plots"
	@echo "make clean   remove .venv and caches"

demo: .venv/.installed-demo
	@$(BIN)/keepwarm demo $(ARGS)

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

# The same for MLX, which has wheels for Linux and Macs. Elsewhere they cannot be installed, and the tests are skipped.
test-mlx: .venv/.installed-demo
	mkdir -p .peers
	case "$$(uname -sm)" in \
	"Linux x86_64"|"Linux aarch64"|"Darwin arm64") \
	    $(BIN)/python benchmarks/peers/environments.py mlx .peers pytest hypothesis pydantic xxhash cryptography && \
	    PYTHONPATH=src:. .peers/mlx/bin/python -m pytest tests/mlx --confcutdir tests/mlx $(ARGS);; \
	*) echo "skipped: MLX has no wheel for $$(uname -sm)";; \
	esac

# The kernels for GPUs under Triton's interpreter, which has wheels for Linux only. Its NumPy is an older one, in front of
# the packages of .venv. The long ones: ARGS="-m slow".
test-triton: .venv/.installed-dev
	mkdir -p .peers
	if $(BIN)/python benchmarks/peers/environments.py triton .peers; then \
	    TRITON_INTERPRET=1 PYTHONPATH=src:. .peers/triton/bin/python -m pytest tests/triton tests/runtime/test_decoders.py -m "not slow" $(ARGS); \
	else echo "skipped: Triton cannot be installed here"; fi

test-llamaserver: .venv/.installed-dev
	mkdir -p .peers
	if command -v c++ >/dev/null; then \
	    $(BIN)/python benchmarks/peers/environments.py llama-server .peers && \
	    $(BIN)/python -m pytest tests/llamaserver --confcutdir tests/llamaserver $(ARGS); \
	else echo "skipped: llama-server is compiled, and there is no C++ compiler (apt install g++)"; fi

# Replicas of `keepwarm serve` behind it, and, where `make test-vllm` has made vLLM's environment, of vLLM.
test-router: .venv/.installed-dev
	mkdir -p .peers
	$(BIN)/python benchmarks/peers/environments.py router .peers
	$(BIN)/python -m pytest tests/routers $(ARGS)

# Without any network but the loopback, where the machine can take it away. ARGS="-k opencode" runs one of them;
# ARGS="--record FILE" adds a line for each. What cannot be installed is skipped, with the reason.
test-clients: .venv/.installed-dev
	mkdir -p .peers
	$(BIN)/python -m tests.clients.install .peers/clients
	KEEPWARM_CLIENTS=.peers/clients $$(unshare -rn true 2>/dev/null && echo unshare -rn) \
	    $(BIN)/python -m pytest tests/clients --confcutdir tests/clients -p no:cacheprovider $(ARGS)

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

# ARGS="--list" shows the plan; benchmarks/all.py says what else there is.
bench-all: .venv/.installed-dev
	PYTHONPATH=src:. $(BIN)/python -m benchmarks.all $(ARGS)

bench-remote: .venv/.installed-dev
	$(BIN)/python benchmarks/remote.py $(ARGS)

bench-peers: .venv/.installed-demo
	$(BIN)/python benchmarks/peers/run.py $(ARGS)

bench-servers: .venv/.installed-dev
	$(BIN)/python benchmarks/peers/servers.py $(ARGS)

# With an interpreter that has torch for the GPU; ARGS="--device adversarial --size tiny --length 1100" tries it without.
gpu:
	PYTHONPATH=src:.:build/gpu $(PYTHON) -m benchmarks.gpu $(ARGS)

# The checkout, and in build/gpu the small packages that a machine with torch and transformers may lack. There: unpack,
# and `make gpu`.
gpu-pack: .venv/.installed-demo
	rm -rf build/gpu && mkdir -p build/gpu
	$(PIP) install -q --no-deps -t build/gpu -c constraints.txt gguf xxhash attrs jsonschema jsonschema-specifications referencing rpds-py pydantic pydantic-core annotated-types typing-inspection
	git archive --format tar -o build/keepwarm-gpu.tar HEAD
	tar --append -f build/keepwarm-gpu.tar build/gpu && gzip -f build/keepwarm-gpu.tar

# Every warning is an error: a link to nothing, a page that no menu names. PYTHONPATH: the pages that are made.
docs: .venv/.installed-docs
	PYTHONPATH=. $(BIN)/mkdocs build --strict $(ARGS)

figures: .venv/.installed-demo
	$(BIN)/python -m tools.figures

clean:
	rm -rf .venv .venv.log src/keepwarm/runtime/native/delivered .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist src/*.egg-info

# Also makes .venv. Shows how far it is, and compiles this machine's kernels meanwhile.
.venv/.installed-demo: $(INPUTS)
	@$(PYTHON) tools/install.py serve
	@touch $@

.venv/.installed-dev: $(INPUTS)
	@$(PYTHON) tools/install.py dev
	@touch $@ .venv/.installed-demo

.venv/.installed-docs: $(INPUTS)
	@$(PYTHON) tools/install.py docs
	@touch $@ .venv/.installed-demo
