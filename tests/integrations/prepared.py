"""For the process that ranks are forked from: it has loaded the frameworks, which takes many seconds."""

from importlib import import_module

for _name in (
    "tests.support.prepared",
    "accelerate",
    "lightning.pytorch",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.trainer",
):
    import_module(_name)
