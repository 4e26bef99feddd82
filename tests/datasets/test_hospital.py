import gzip
import lzma
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.datasets import hospital
from coterie.errors import CoterieError
from coterie.parameters import layout_of
from coterie.tasks import Dataset, DataSource

HEADER = (
    "DRG Definition,Provider Id,Provider Name,Provider Street Address,Provider City,Provider State,"
    "Provider Zip Code,Hospital Referral Region Description, Total Discharges , Average Covered Charges ,"
    " Average Total Payments ,Average Medicare Payments\n"
)


def line(drg: str = "194 - X", provider: str = "10001", zip_code: str = "36301", payment: str = "$5777.24") -> str:
    return f'{drg},{provider},"A, B",1 ST,DOTHAN,AL,{zip_code},AL - Dothan,91,$32963.07,{payment},$4763.73\n'


def write(folder: Path, *lines: str) -> Path:
    path = folder / "charges.csv"
    path.write_text(HEADER + "".join(lines))
    return path


def read(path: Path, partition_by: str | None = None, *, strict: bool = False) -> Dataset:
    return hospital.read(DataSource(path, partition_by, strict=strict))


@pytest.fixture
def path(real_data: Path) -> Path:
    return real_data / "hospital_charges_fy2011_10drgs.csv.xz"


class TestRealFile:
    def test_rows_per_service(self, path: Path) -> None:
        (client,) = read(path).clients
        service = torch.round(client.inputs[:, 0] * 1.5 + 1.5).long()
        assert torch.bincount(service).tolist() == [3023, 2953, 2950, 2989]
        assert client.name == "hospital_charges_fy2011_10drgs"

    def test_providers_and_zips(self, path: Path) -> None:
        data = read(path, "provider")
        assert len(data.clients) == 3151
        assert sum(client.rows for client in data.clients) == 3023 + 2953 + 2950 + 2989
        assert max(client.rows for client in data.clients) <= 4
        assert any("13874 rows left out" in note for note in data.notes)
        assert len(read(path, "zip").clients) == 2948

    def test_first_100_are_well_mixed_and_always_the_same(self, path: Path) -> None:
        names = [client.name for client in read(path, "provider").clients[:100]]
        # A provider id begins with a state's number: 51 of them in the file, Alabama's first.
        assert len({name[9:11] for name in names}) > 25
        assert names[:3] == ["provider-170150", "provider-050280", "provider-100075"]

    def test_inputs_and_targets_are_of_order_1(self, path: Path) -> None:
        (client,) = read(path).clients
        assert client.inputs.abs().max() < 2.3
        assert client.targets.min() > 0.3
        assert client.targets.max() < 2.5

    def test_hidden_units_are_alive_for_everybody_in_most_draws(self, path: Path) -> None:
        (client,) = read(path).clients
        rng = np.random.default_rng(0)
        for _ in range(50):
            active = hospital.initialise(rng).hidden(client.inputs) > 0
            assert active.float().mean(0).min() > 0.95


def test_a_row_s_scaled_values(tmp_path: Path) -> None:
    # The zipcodes package has 36301 (Dothan, Alabama) at longitude -85.4, latitude 31.1, to 0.2 degrees.
    (client,) = read(write(tmp_path, line("292 - HEART"))).clients
    service, longitude, latitude = client.inputs[0].tolist()
    assert service == pytest.approx(-1 / 3)
    assert longitude * 30 - 96 == pytest.approx(-85.4, abs=0.2)
    assert latitude * 12.5 + 37 == pytest.approx(31.15, abs=0.2)
    assert client.targets[0].item() == pytest.approx(0.577724)


def test_report_is_rmse_in_dollars() -> None:
    outputs, targets = torch.tensor([[0.6]]), torch.tensor([[0.5]])
    mean = float(hospital.task.score(outputs, targets).mean())
    assert hospital.task.report(mean) == pytest.approx(1000, rel=1e-5)
    assert hospital.task.decode is not None
    assert hospital.task.decode(torch.tensor([[0.577724]])) == [5777.24]


def test_model_has_exactly_11_parameters() -> None:
    layout = layout_of(hospital.task.build())
    assert layout.size == 11
    assert {layer.name: layer.size for layer in layout.layers} == {"hidden": 8, "output": 3}
    assert isinstance(hospital.task.clipping_norm, dict)
    assert set(hospital.task.clipping_norm) == {"hidden", "output"}


def test_hypotheses_start_at_price_levels_between_5000_and_12000_dollars() -> None:
    rng = np.random.default_rng(0)
    # At the origin of the inputs, the middle of the country and of the services.
    levels = [hospital.initialise(rng)(torch.zeros(1, 3)).item() for _ in range(200)]
    assert min(levels) > 0.5 - 1e-6
    assert max(levels) < 1.2 + 1e-6
    # Uniform: a tenth of the range at either end stays empty with probability 0.9²⁰⁰ = 7e-10.
    assert min(levels) < 0.57
    assert max(levels) > 1.13


@pytest.mark.parametrize("amount", ["$5777.24", " $5777.24 ", "5777.24", '"$5,777.24"'])
def test_forms_of_an_amount(tmp_path: Path, amount: str) -> None:
    (client,) = read(write(tmp_path, line(payment=amount))).clients
    assert client.targets.item() == pytest.approx(0.577724)


@pytest.mark.parametrize("zip_code", ["1040", "01040", "01040-1234"])
def test_forms_of_a_zip_code(tmp_path: Path, zip_code: str) -> None:
    (client,) = read(write(tmp_path, line(zip_code=zip_code)), "zip").clients
    assert client.name == "zip-01040"


def test_provider_id_without_and_with_leading_zero_is_the_same(tmp_path: Path) -> None:
    path = write(tmp_path, line(provider="10001"), line(provider="010001"), line(provider="670001"))
    assert Counter(read(path, "provider").clients[i].name for i in range(2)) == {
        "provider-010001": 1,
        "provider-670001": 1,
    }


def test_compressed_files(tmp_path: Path) -> None:
    content = (HEADER + line()).encode()
    for suffix, compress in (("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)):
        path = tmp_path / f"charges.csv{suffix}"
        path.write_bytes(compress(content))
        (client,) = read(path).clients
        assert client.name == "charges"
        assert client.rows == 1


def test_unknown_zip_is_counted_and_skipped_or_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, line(), line(provider="10002", zip_code="00000"), line(provider="10003", zip_code="x"))
    data = read(path, "provider")
    assert [client.name for client in data.clients] == ["provider-010001"]
    assert data.notes == (
        "charges.csv: 2 rows skipped: ZIP code does not resolve ('00000', 'x')",
        "charges.csv: 2 data holders left out: no usable row",
    )
    with pytest.raises(CoterieError, match=r"'Provider Zip Code' at line 3 of .*charges.csv, found '00000'"):
        read(path, strict=True)


@pytest.mark.parametrize("amount", ["", "nan", "$inf", "-1e999", "about 5", "$5.7.7"])
def test_a_payment_that_is_no_number_is_named_with_its_place(tmp_path: Path, amount: str) -> None:
    path = write(tmp_path, line(), line(payment=amount))
    with pytest.raises(CoterieError) as caught:
        read(path)
    message = str(caught.value)
    assert f"'Average Total Payments' at line 3 of {path}, found {amount!r}" in message
    assert "\n" not in message


def test_a_drg_and_a_provider_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=r"'DRG Definition' at line 2 of .*found 'PNEUMONIA'"):
        read(write(tmp_path, line("PNEUMONIA")))
    with pytest.raises(CoterieError, match=r"'Provider Id' at line 2 of .*found '../../etc'"):
        read(write(tmp_path, line(provider="../../etc")), "provider")


def test_missing_columns_are_named_with_those_found(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("DRG Definition,Provider Zip Code,Payments\n194 - X,36301,5\n")
    with pytest.raises(CoterieError, match=r"column 'Average Total Payments' in .*found 'DRG Definition', 'Provid"):
        read(path)
    path.write_text("DRG Definition,Provider Zip Code,Average Total Payments\n194 - X,36301,5\n")
    assert read(path).clients[0].rows == 1
    with pytest.raises(CoterieError, match="column 'Provider Id'"):
        read(path, "provider")
    path.write_text("DRG Definition,Provider Zip Code,Average Total Payments,Provider Zip Code\n")
    with pytest.raises(CoterieError, match="'Provider Zip Code' twice"):
        read(path)


def test_rows_of_another_length_and_no_usable_rows(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=r"Expected 12 fields at line 3 of .*found 2"):
        read(write(tmp_path, line(), "194 - X,1\n"))
    with pytest.raises(CoterieError, match=r"Expected rows of DRG 194, 292, 392, 690 in .*1 rows left out"):
        read(write(tmp_path, line("100 - OTHER")))
    assert read(write(tmp_path, line(), "\n")).clients[0].rows == 1


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=r"Expected a file at .*nope.csv, found none"):
        read(tmp_path / "nope.csv")
    with pytest.raises(CoterieError, match="found a folder"):
        read(tmp_path)
    with pytest.raises(CoterieError, match="Expected --data"):
        hospital.read(DataSource())
    empty = tmp_path / "empty.csv"
    empty.touch()
    with pytest.raises(CoterieError, match="found an empty file"):
        read(empty)
    for suffix, compress in ((".gz", gzip.compress), (".xz", lzma.compress)):
        truncated = tmp_path / f"t.csv{suffix}"
        truncated.write_bytes(compress((HEADER + line() * 100).encode())[:-20])
        with pytest.raises(CoterieError, match=f"complete {suffix} file"):
            read(truncated)
    binary = tmp_path / "b.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CoterieError, match=r"UTF-8 text in .*byte 0xff at offset 0"):
        read(binary)
    open_quote = tmp_path / "q.csv"
    open_quote.write_text(HEADER + '194 - X,"10001')
    with pytest.raises(CoterieError, match=r"CSV row at line 2 of .*q\.csv"):
        read(open_quote)


def test_inputs_for_prediction_need_no_payments(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(" Provider Zip Code ,DRG Definition,Note\n36301,690 - X,é\n36301,100 - Y,b\n")
    table = hospital.read_inputs(path)
    assert table.columns == {"Provider Zip Code": ["36301"], "DRG Definition": ["690 - X"], "Note": ["é"]}
    assert table.inputs[0, 0] == 1
    assert table.notes == ("x.csv: 1 rows left out: of DRGs other than 194, 292, 392, 690",)
