# `make demo` runs the whole loop on a small real model, `make test` runs every test; both install what they need into .venv.
PYTHON ?= $(shell python3.11 -c 'print("python3.11")' 2>/dev/null || echo python3)
PIP := .venv/bin/pip install --quiet --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: demo install test lint check-config serve-config gpu-check clean

demo: .venv/.installed-base
	.venv/bin/python jobs/pipeline.py $(ARGS)

# .venv alone, for what the README says of your own model.
install: .venv/.installed-base

# Two processes: one for all that needs a Ray cluster (tests/conftest.py), one for the rest.
test: .venv/.installed-dev
	.venv/bin/pytest -n 2 --dist loadscope --no-loadscope-reorder $(ARGS)

lint: .venv/.installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# Every config, deployment file and manifest, strictly and without a cluster.
check-config: .venv/.installed-base
	.venv/bin/python jobs/check_config.py $(ARGS)

# The same, after the manifests took over what deployments/ says now.
serve-config: .venv/.installed-base
	.venv/bin/python jobs/check_config.py write_serve_config=true

# On a machine with a CUDA device: what only that can show, in at most eight minutes.
gpu-check: .venv/.installed-base
	.venv/bin/python benchmarks/gpu_check.py $(ARGS)

clean:
	rm -rf .venv runs mlflow.db mlruns build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find platform jobs tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf platform/*.egg-info

# torch comes first and exactly: a later requirement that merely names torch would otherwise pick its newest release.
.venv/.created:
	$(PYTHON) -m venv --clear .venv
	touch $@

.venv/.installed-base: .venv/.created pyproject.toml constraints.txt
	$(PIP) $(TORCH)
	$(PIP) -c constraints.txt -e .
	touch $@

.venv/.installed-dev: .venv/.created pyproject.toml constraints.txt
	$(PIP) $(TORCH)
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@ .venv/.installed-base
