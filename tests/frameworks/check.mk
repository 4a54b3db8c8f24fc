# The recipes of docs/how-to/frameworks.md and dataloader-frameworks.md, trained with eleven frameworks.
.PHONY: check-frameworks .frameworks
ENVIRONMENTS += .frameworks-venv
check-frameworks:
	$(call in,.frameworks-venv,.frameworks)

.frameworks: build $(VENV)/.recipes
	$(PY) -m pytest tests/frameworks $(ARGS)

# torchtitan's own trainer, on ranks without a GPU. It needs a newer torch than the recipes.
.PHONY: check-torchtitan .torchtitan
ENVIRONMENTS += .torchtitan-venv
check-torchtitan:
	$(MAKE) VENV=.torchtitan-venv TORCH=torch==2.14.1 .torchtitan

.torchtitan: build $(VENV)/.titan
	$(PY) -m pytest -o faulthandler_timeout=600 tests/frameworks/test_torchtitan.py $(ARGS)

$(VENV)/.titan: tests/frameworks/torchtitan.txt | $(VENV)/.test
	$(PIP) install --requirement $<
	$(PIP) install --no-deps torchtitan==0.3.0
	touch $@

# fastai and Composer ask for a torchvision that fits the torch here, or for an older torch. Neither is
# needed by the recipes, so these two come without what they ask for; requirements.txt has the rest.
$(VENV)/.recipes: tests/frameworks/requirements.txt tests/frameworks/alone.txt | $(VENV)/.test
	$(PIP) install --requirement tests/frameworks/requirements.txt
	$(PIP) install --no-deps --requirement tests/frameworks/alone.txt
	touch $@
