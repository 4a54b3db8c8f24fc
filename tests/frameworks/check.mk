# The recipes of docs/how-to/frameworks.md and dataloader-frameworks.md, trained with eleven frameworks.
.PHONY: check-frameworks .frameworks
ENVIRONMENTS += .frameworks-venv
check-frameworks:
	$(call in,.frameworks-venv,.frameworks)

.frameworks: build $(VENV)/.recipes
	$(PY) -m pytest tests/frameworks $(ARGS)

# fastai and Composer ask for a torchvision that fits the torch here, or for an older torch. Neither is
# needed by the recipes, so these two come without what they ask for; requirements.txt has the rest.
$(VENV)/.recipes: tests/frameworks/requirements.txt tests/frameworks/alone.txt | $(VENV)/.test
	$(PIP) install --requirement tests/frameworks/requirements.txt
	$(PIP) install --no-deps --requirement tests/frameworks/alone.txt
	touch $@
