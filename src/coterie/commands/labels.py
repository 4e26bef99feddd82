"""``coterie labels``: tables whose label column is private, given away with noisy labels, and what that costs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.errors import CoterieError
from coterie.labels.plan import Mechanism

app = typer.Typer(no_args_is_help=True, help="Randomize a table's private labels, once, and account for it.")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def sanitize(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The table: .csv, .tsv, .npz or .parquet.")],
    label: Annotated[str, typer.Option(help="The private column (npz: array).")],
    out: Annotated[Path, typer.Option(help="Where to write the table with noisy labels, in the same format.")],
    epsilon: Annotated[float, typer.Option(help="ε of label differential privacy.")],
    mechanism: Annotated[Mechanism, typer.Option(help="How labels are randomized.")] = Mechanism.RR,
    labels: Annotated[
        str | None, typer.Option(help="The possible labels, a,b,c: public, not read off the data.")
    ] = None,
    classes: Annotated[int | None, typer.Option(help="In place of --labels: K labels, 0 … K − 1.")] = None,
    prior: Annotated[
        Path | None,
        typer.Option(help="Probabilities: a table with a column per label (and --group), or .npy (K,) or (n, K)."),
    ] = None,
    public: Annotated[
        Path | None, typer.Option(help="Prior from public labels: a table with the same --label and --group columns.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="A public column: rows with the same value share a prior, or are a cluster.")
    ] = None,
    features: Annotated[str | None, typer.Option(help="Numeric columns for k-means clusters: a,b,c.")] = None,
    clusters: Annotated[int | None, typer.Option(help="How many k-means clusters.")] = None,
    k: Annotated[int | None, typer.Option(help="rr-top-k: how many labels each row may show.")] = None,
    floor: Annotated[
        float | None, typer.Option(help="cluster-rr: τ, the least probability of a label in a cluster, up to 1/K.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="p2p: δ. Default 1/s² for the smallest cluster, of s rows.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(help="Private folder of release records. Default: beside FILE.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write FILE to --out with randomized labels; every other column stays as it is, in the same order.

    Beside it: OUT.labels.json, the loss a learner must minimize and the guarantee, and OUT.labels.npz with its arrays.
    These three may be given away. The records (coterie-label-releases/ beside FILE) may not: by them the same labels
    are never randomized twice, which would leak; a second run with the same choices writes the same noisy labels.

    Rows that are added later belong in a table of their own. Noise comes from the operating system; there is no seed.
    """
    from coterie.labels.alphabet import Alphabet
    from coterie.labels.plan import Plan, groups_of, prior_of
    from coterie.labels.releases import FOLDER, Source, opened
    from coterie.labels.sanitizing import guarantee
    from coterie.labels.sanitizing import sanitize as randomize
    from coterie.labels.tables import open_table
    from coterie.labels.weights import FORMAT
    from coterie.rng import secure

    plan = Plan(
        mechanism=mechanism,
        epsilon=epsilon,
        alphabet=Alphabet.given(classes=classes, labels=labels),
        delta=delta,
        k=k,
        floor=floor,
        prior=prior,
        public=public,
        group=group,
        features=tuple(name.strip() for name in features.split(",")) if features else (),
        clusters=clusters,
    )
    table = open_table(file)
    _check_out(out, file)
    table.expect_column(label, "--label")
    if label in (plan.group, *plan.features):
        raise CoterieError(f"Expected --group and --features without the private {label!r}, found it among them")
    before = _stamp(file)
    own, digest = _private_labels(table, plan, label)
    source, identity = Source(file, label, digest), plan.identity()
    folder = records or file.parent / FOLDER
    with opened(folder) as releases:
        earlier = releases.find(source)
        if earlier is not None:
            _check_earlier(earlier, source, identity)
            released, identifier = earlier.sanitized, earlier.identifier
        else:
            _expect_no_files(out)
            groups = groups_of(plan, table)
            needs_prior = mechanism in {Mechanism.RR_TOP_K, Mechanism.RR_WITH_PRIOR}
            weights = prior_of(plan, groups, label, own.size) if needs_prior else None
            released = randomize(plan, own, groups, weights, rng=secure())
            if _stamp(file) != before:
                raise CoterieError(f"Expected {file} to stay as it is meanwhile, found it changed: run this again")
            identifier = releases.store(source, identity, out, released)
        promise = guarantee(plan, released, column=label)
        specification = {
            "format": FORMAT,
            "identifier": identifier,
            "label": label,
            "classes": list(plan.alphabet.names),
            "rows": int(released.labels.size),
            "mechanism": mechanism.value,
            "release": asdict(released.event),
            "loss": released.loss,
            "guarantee": list(promise),
        }
        _write_beside(out, specification, released)
        try:
            table.write(out, label, released.labels, plan.alphabet.names)
        except OSError as error:
            raise CoterieError(
                f"Expected to write the table to {out}, found: {error}; nothing leaked: run this again"
            ) from error
    if as_json:
        print(json.dumps(specification | {"out": str(out), "new_release": earlier is None}, indent=2, allow_nan=False))
        return
    again = "" if earlier is None else f", the same as in {earlier.out} ({earlier.when}): no further cost"
    print(f"{released.labels.size:,} noisy labels in {out}{again}")
    for sentence in promise:
        print(f"  {sentence}")
    print(f"Keep {folder} with the true labels, and give it to nobody: by it no label is randomized twice.")


@app.command()
def account(
    specifications: Annotated[
        list[Path] | None, typer.Argument(metavar="[SPECIFICATION]…", help="OUT.labels.json files of released tables.")
    ] = None,
    disjoint: Annotated[
        bool, typer.Option("--disjoint", help="The tables are about different people: the dearest counts, not the sum.")
    ] = False,
    mechanism: Annotated[
        str | None,
        typer.Option(
            help="A release to plan, in place of specifications: rr, rr-top-k, rr-with-prior, uniform-rr, cluster-rr, "
            "p2p, noisy-wtd-llp or wtd-lba."
        ),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Its ε.")] = None,
    delta: Annotated[float | None, typer.Option(help="p2p: the δ to reach. Default 1/s².")] = None,
    classes: Annotated[int | None, typer.Option(help="K, of the randomized responses.")] = None,
    floor: Annotated[float | None, typer.Option(help="cluster-rr: τ.")] = None,
    cluster_size: Annotated[int | None, typer.Option(help="p2p: s, rows in the cluster.")] = None,
    rows: Annotated[int | None, typer.Option(help="noisy-wtd-llp: n.")] = None,
    bag_size: Annotated[int | None, typer.Option(help="noisy-wtd-llp: k.")] = None,
    bags: Annotated[int | None, typer.Option(help="noisy-wtd-llp: m.")] = None,
    noisy: Annotated[int | None, typer.Option(help="noisy-wtd-llp: how many labels get N(0, 1) noise.")] = None,
    label_bound: Annotated[float | None, typer.Option(help="noisy-wtd-llp: B, labels are in [−B, B].")] = None,
    releases: Annotated[int, typer.Option(help="How many such releases of the same labels.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Show what released tables cost together, or what a planned release costs and what it must be set to."""
    from coterie.labels.pricing import Planned, price_of_plan, price_of_tables, words
    from coterie.labels.pricing import as_json as answer_of

    planned = Planned(
        mechanism or "", epsilon, delta, classes, floor, cluster_size, rows, bag_size, bags, noisy, label_bound
    )
    settings: dict[str, float] = {}
    if mechanism is None:
        if releases != 1 or any(value is not None for name, value in vars(planned).items() if name != "mechanism"):
            raise CoterieError("Expected --mechanism with the other options of a planned release, found none")
        price = price_of_tables(specifications or [], disjoint=disjoint)
    elif specifications or disjoint:
        raise CoterieError("Expected specifications or --mechanism, found both")
    else:
        price, settings = price_of_plan(planned, releases=releases)
    if as_json:
        print(json.dumps(answer_of(price, settings), indent=2, allow_nan=False))
        return
    print(words(price))
    for name, value in settings.items():
        print(f"  {name.replace('_', ' ')}: {value!r}")


def _check_out(out: Path, file: Path) -> None:
    if out.suffix.lower() != file.suffix.lower():
        raise CoterieError(f"Expected --out to end in {file.suffix}, as {file.name} does, found {str(out)!r}")
    if not out.parent.is_dir():
        raise CoterieError(f"Expected --out in a folder that exists, found {str(out.parent)!r}: make it first")
    if out.exists():
        raise CoterieError(f"Expected --out to be a new file, found {out} there already: nothing is overwritten")


def _expect_no_files(out: Path) -> None:
    from coterie.labels.weights import arrays_path, specification_path

    for path in (specification_path(out), arrays_path(out)):
        if path.exists():
            raise CoterieError(
                f"Expected {path} not to be there, found it: the labels of {out.name} were released before"
            )


def _check_earlier(earlier: Any, source: Any, identity: dict[str, Any]) -> None:
    """A release of the same labels is only ever given again; anything else would be a second one."""
    event = earlier.sanitized.event
    cost = f"ε = {event.epsilon:g}" + (f", δ = {event.delta:.3g}" if event.delta else "")
    made = f"{earlier.out}, {earlier.when}, {cost}"
    if earlier.digest != source.digest:
        raise CoterieError(
            f"Expected the labels of {source.column!r} as they were when they were released ({made}), found changed "
            "ones: use that table, and put new rows into a file of their own"
        )
    if earlier.plan != identity:
        changed = ", ".join(name for name in identity if identity[name] != earlier.plan.get(name))
        raise CoterieError(
            f"Expected labels that were not released yet, found them released ({made}) with other choices of "
            f"{changed}: use that table; a second release would add its ε to the first"
        )


def _write_beside(out: Path, specification: dict[str, Any], released: Any) -> None:
    from coterie.labels.releases import packed
    from coterie.labels.weights import arrays_path, specification_path
    from coterie.storage import write_atomically

    files = {
        arrays_path(out): packed(released),
        specification_path(out): (json.dumps(specification, indent=2, ensure_ascii=False) + "\n").encode(),
    }
    for path, content in files.items():
        if path.exists() and path.read_bytes() != content:
            raise CoterieError(f"Expected {path} to belong to this release, found another one's: name another --out")
    try:
        for path, content in files.items():
            write_atomically(path, content)
    except OSError as error:
        raise CoterieError(f"Expected to write beside {out}, found: {error}") from error


def _private_labels(table: Any, plan: Any, label: str) -> tuple[Any, str]:
    """The labels as class numbers (n,), and their hash; nothing of either is in an error's text."""
    from coterie.labels.releases import digest_of
    from coterie.labels.tables import open_table

    codes, values = table.coded(label)
    if not codes.size:
        raise CoterieError(f"Expected rows in {table.path}, found none")
    own = plan.alphabet.encode(codes, values, column=label)
    if copies := table.copies(label):
        raise CoterieError(
            f"Expected the labels in {label!r} only, found the same values in {', '.join(copies)}: remove that first"
        )
    digest = digest_of(codes, values)
    if plan.public is not None:
        public = open_table(plan.public)
        if digest_of(*public.coded(public.expect_column(label, "--label"))) == digest:
            raise CoterieError(
                f"Expected public labels in {plan.public}, found the private ones: such a prior voids the guarantee"
            )
    return own, digest


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns
