PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test test-full lint measure-pipeline measure-context measure-zero clean

demo: $(READY)  ## train the demo preset on 2 processes, then prove it equal to the dense model
	rm -rf out/demo
	$(BIN)/minimind-tron train --config configs/demo.toml --output-dir out/demo
	$(BIN)/minimind-tron validate --tp-size 2 --sequence-parallel --vocab-parallel --weights out/demo/model \
		--seq-len 64 --optimizer-steps 5 --json out/demo/validate.json
	@echo
	@echo "metrics     out/demo/metrics.jsonl"
	@echo "loss curve  out/demo/loss.png"
	@echo "sample      out/demo/sample.txt"
	@echo "model       out/demo/model (transformers opens it as Qwen3ForCausalLM)"
	@echo "proof       out/demo/validate.json"

test: $(READY)  ## the whole test suite
	$(BIN)/python -m pytest

test-full: $(READY)  ## also the whole products, with the listed numbers of steps; takes much longer
	$(BIN)/python -m pytest --full

measure-pipeline: $(READY)  ## the figures of pipelines in the docs: some minutes on two idle cores
	$(BIN)/python -m measurements.pipeline

measure-context: $(READY)  ## the figures of context parallelism in the docs: some minutes on two idle cores
	$(BIN)/python -m measurements.context

measure-zero: $(READY)  ## the figures of ZeRO and recomputation in the docs: a few minutes on two idle cores
	$(BIN)/python -m measurements.zero

lint: $(READY)
	$(BIN)/ruff check minimind_tron tests measurements
	$(BIN)/ruff format --check minimind_tron tests measurements
	$(BIN)/mypy

clean:
	rm -rf $(VENV) out build *.egg-info

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is wanted, $$($(PYTHON) --version) was found: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)
