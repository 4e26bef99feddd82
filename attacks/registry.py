"""The attacks by the names that ``dlg-eval --attacks`` takes."""

from collections.abc import Mapping
from difflib import get_close_matches

from coterie.attacks.attack import Attack
from coterie.errors import CoterieError

# dlg, idlg, box, cosine, map-tv, map-pca, map-class, analytic, label, candidates, cluster, norm
ATTACKS: Mapping[str, Attack] = {}


def attack_named(name: str) -> Attack:
    """The attack called ``name``, with its default effort. Raises ``CoterieError`` with the nearest known name."""
    if name in ATTACKS:
        return ATTACKS[name]
    near = get_close_matches(name, ATTACKS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise CoterieError(f"Expected attack to be one of {', '.join(ATTACKS)}, found {name!r}{hint}")
