"""The policy of a bench run, as the command line and workloads write it."""

from gradwire.ddp.layout import TINY, TINY_ELEMENTS, Policy, by_size, fixed
from gradwire.lab.bench.entries import Entry, parse_entry

_FORMS = "expected none, by_size(smallest=256), or pattern=recipe; pattern=recipe"


def policy_of(text: str) -> Policy:
    """What `attach` takes as `policy`, from one of three forms.

    `none`: every parameter by the recipe. `by_size(smallest=256)`: vectors and tensors of fewer elements as
    the recipe sends its tiny ones, or by `recipe=…`. `pattern=recipe; pattern=recipe`: glob patterns over
    names, of which the first match counts. `ValueError` for anything else, and for recipes that a policy
    cannot name.

    >>> policy_of("*.bias=dense; head.*=topk(ratio=0.1)")
    {'*.bias': 'dense', 'head.*': 'topk(ratio=0.1)'}
    """
    if text.strip() == "none":
        return {}
    if text.strip().startswith("by_size"):
        return _by_size(parse_entry(text, "policy"))
    pairs = [piece.partition("=") for piece in text.split(";") if piece.strip()]
    patterns = {pattern.strip(): recipe.strip() for pattern, _, recipe in pairs}
    if not pairs or not all(pattern and recipe for pattern, recipe in patterns.items()):
        raise ValueError(f"policy {text!r}: {_FORMS}")
    if len(patterns) < len(pairs):
        raise ValueError(f"policy {text!r}: a pattern is given twice")
    for recipe in patterns.values():
        fixed(recipe)
    return patterns


def _by_size(entry: Entry) -> Policy:
    options = {"smallest": TINY_ELEMENTS, "recipe": TINY, **entry.options}
    smallest, recipe = options.pop("smallest"), options.pop("recipe")
    if entry.stem != "by_size" or options:
        raise ValueError(f"policy {entry.name!r}: {_FORMS}")
    if not isinstance(smallest, int) or smallest < 0:
        raise ValueError(f"policy {entry.name!r}: smallest={smallest!r} must be a number of elements")
    if recipe != TINY:
        fixed(str(recipe))
    return by_size(smallest, str(recipe))
