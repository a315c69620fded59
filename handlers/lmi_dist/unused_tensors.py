"""The warning of tensors in a model's files that the model has no use for."""

import logging
import re
from collections.abc import Iterable

# What older libraries saved beside the weights though it follows from config.json (angles of
# rotations, masks of attention), and what a trainer left there. All else that a program does not
# use is told.
LEFTOVERS = re.compile(
    r"(.*\.)?(rotary_emb\.\w+|attn\.(masked_)?bias|attention\.(masked_)?bias)|(optimizer|exp_avg|exp_avg_sq)\..*"
)
# A warning names so many tensors.
MAX_NAMED = 3

log = logging.getLogger(__name__)


def tell_unused(folder: object, names: Iterable[str]) -> None:
    """Warn of the tensors `names` in the files of a folder, but for leftovers."""
    unused = sorted(name for name in names if not LEFTOVERS.fullmatch(name))
    if not unused:
        return

    tensors = f"{len(unused)} tensors of its weight files are"
    pronoun = "them"
    if len(unused) == 1:
        tensors = "1 tensor of its weight files is"
        pronoun = "it"

    first_names = ", ".join(unused[:MAX_NAMED])
    if len(unused) > MAX_NAMED:
        first_names += ", …"

    log.warning(
        "%s: %s not used, config.json has no place for %s: %s",
        folder,
        tensors,
        pronoun,
        first_names,
    )
