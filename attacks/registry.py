"""The attacks by the names that ``dlg-eval --attacks`` takes."""

from collections.abc import Mapping
from difflib import get_close_matches

from coterie.attacks.analytic import AnalyticFirstLayer
from coterie.attacks.attack import Attack
from coterie.attacks.box import BoxConstrained
from coterie.attacks.candidates import CandidateIdentification
from coterie.attacks.cluster import ClusterIdentification
from coterie.attacks.cosine import CosineSimilarity
from coterie.attacks.dlg import DLG, IDLG
from coterie.attacks.labels import LabelInference
from coterie.attacks.norms import NormSideChannel
from coterie.attacks.posterior import MaximumPosterior, Prior
from coterie.errors import CoterieError

ATTACKS: Mapping[str, Attack] = {
    attack.name: attack
    for attack in (
        DLG(),
        IDLG(),
        BoxConstrained(),
        CosineSimilarity(),
        MaximumPosterior(Prior.VARIATION),
        MaximumPosterior(Prior.PRINCIPAL),
        MaximumPosterior(Prior.CLASS),
        AnalyticFirstLayer(),
        LabelInference(),
        CandidateIdentification(),
        ClusterIdentification(),
        NormSideChannel(),
    )
}


def attack_named(name: str) -> Attack:
    """The attack called ``name``, with its default effort. Raises ``CoterieError`` with the nearest known name."""
    if name in ATTACKS:
        return ATTACKS[name]
    near = get_close_matches(name, ATTACKS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise CoterieError(f"Expected attack to be one of {', '.join(ATTACKS)}, found {name!r}{hint}")
