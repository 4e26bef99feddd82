"""What a data holder is told, in words, before anything leaves: what is protected, what it costs, what is not."""

from collections.abc import Iterator

from coterie.client.ledger import ROUNDING
from coterie.client.policy import PrivacyPolicy
from coterie.config import ClientSettings, Selection
from coterie.mechanisms.events import Neighbourhood


def statement(settings: ClientSettings, policy: PrivacyPolicy) -> list[str]:
    """The privacy statement, a line an item. Every number in it follows from the settings; none from the data."""
    return [*_update(policy), *_budget(settings, policy), *_uncovered(settings)]


def _update(policy: PrivacyPolicy) -> Iterator[str]:
    nu, cost, n = policy.noise_multiplier, policy.release_loss, sum(policy.sizes)
    if policy.neighbourhood is Neighbourhood.RELATIVE:
        yield (
            f"RELATIVE neighbourhood: noise is scaled by the update itself, ε = n/(ν‖δ‖) with ν = {nu:g}. This is "
            f"the paper's heuristic and NOT a formal guarantee: the length of what is sent shows the length of the "
            f"update. An update shorter than {policy.relative_floor:g} of the clipping norm gets the noise of one that "
            f"long. The ledger charges n/ν = {n}/{nu:g} = {cost:.4g} a release, as the paper does."
        )
        return
    layers = ", ".join(
        f"{name} ({size} numbers, C = {radius:g})"
        for name, size, radius in zip(policy.names, policy.sizes, policy.radii, strict=True)
    )
    yield (
        f"Each update is clipped and gets L2 Laplace noise of mean length ν·C, ν = {nu:g}, in: {layers}. For two data "
        f"sets that choose the same hypothesis, one release costs at most n/ν = {n}/{nu:g} = {cost:.4g} of pure "
        f"privacy loss ε when their updates are within C of each other in every layer, and at most twice that for "
        f"any two."
    )


def _budget(settings: ClientSettings, policy: PrivacyPolicy) -> Iterator[str]:
    each = policy.release_loss + (settings.selection_epsilon or 0.0)
    releases = f"{settings.budget / each * (1 + ROUNDING) // 1:.12g}"
    yield (
        f"Budget: the sum of these costs over all releases on this data, in this and in earlier runs, stays at or "
        f"below {settings.budget:g} (at least {releases} releases from an empty ledger); after that rounds are "
        f"refused. A server may only ask for more noise, never for less."
    )
    if policy.neighbourhood is Neighbourhood.FIXED and releases != "0":
        layers = ",".join(map(str, policy.sizes))
        yield (
            f"The (ε, δ) price of that many updates: coterie account --layers {layers} "
            f"--noise-multiplier {policy.noise_multiplier:g} --rounds {releases} --delta {settings.delta:g} "
            f"(proven as long as no server asks for more noise than this; a private choice of the hypothesis costs its "
            f"ε on top)"
        )


def _uncovered(settings: ClientSettings) -> Iterator[str]:
    if settings.selection is Selection.ARGMIN:
        yield (
            "NOT covered: which hypothesis was chosen. With assignment = client its index is sent; with assignment = "
            "server it can be guessed from the vector. --selection randomized makes the choice private."
        )
    else:
        yield (
            f"The choice of hypothesis is private ({settings.selection}, ε = {settings.selection_epsilon:g} a round, "
            f"counted in the ledger and the budget)."
        )
    if settings.validation:
        yield (
            "NOT covered: if the server holds this client out for validation, its loss and score leave as they are, "
            "once a round, and it trains in no round of that run; both are named by the server. A dishonest server can "
            "work out rows from such numbers: say --no-validation unless you trust the server with them."
        )
    if settings.share_sample_count:
        yield "NOT covered: the number of rows, sent when the server weighs by samples."
    yield "NOT covered: that this client takes part and how long it needs; floating-point rounding (docs/privacy.md)."
