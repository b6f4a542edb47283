"""Signatures: who has made a store or a city; everything else than what was signed is refused."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mdpext_dask import audit, build, open_mechanism
from mdpext_dask.errors import DataError, GuaranteeViolation, SpecError
from mdpext_dask.job.spec import parse_job
from mdpext_dask.runtime import open_city
from mdpext_dask.runtime.signatures import SigningKey, new_signing_key, public_key_of
from mdpext_dask.sampling.export import export_city
from mdpext_dask.sampling.files import sample_file
from mdpext_dask.sampling.sign import sign
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.signature import SIGNATURE
from tests.support.cities import Change, put, rewritten, write_city
from tests.support.forged import flip_a_bit
from tests.support.inside import call
from tests.support.refusals import refusal

PLACE = {"lon": -73.97, "lat": 40.78}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two secret keys."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        new_signing_key(folder / name)
    return folder / "ours", folder / "theirs"


@pytest.fixture(scope="module")
def signed_store(keys: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, small_job: Any) -> Path:
    """Return a store that is signed with the first."""
    path = tmp_path_factory.mktemp("store") / "s.zarr"
    build(parse_job(small_job()), str(path))
    sign(path, keys[0])
    return path


def public(key: Path) -> Path:
    return key.with_name(f"{key.name}.pub")


def uses_of_store(store: Path, key: Any, folder: Path) -> list[Callable[[], object]]:
    points = folder / "points.csv"
    points.write_text("lon,lat\n-73.97,40.78\n")
    return [
        lambda: open_mechanism(store, trusted_key=key).sample(**PLACE),
        lambda: audit(store, trusted_key=key),
        lambda: export_city(str(store), folder / "c.mdp", trusted_key=key, overwrite=True),
        lambda: sample_file(str(store), points, folder / "out.csv", trusted_key=key, overwrite=True),
    ]


def test_a_signed_store_is_used(signed_store: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    digits = public_key_of(public(keys[0]))
    for key in (public(keys[0]), str(public(keys[0])), digits):
        for use in uses_of_store(signed_store, key, tmp_path):
            use()
    report = audit(signed_store, trusted_key=digits)
    assert report.holds
    assert report.as_json()["signed_by"] == digits
    assert "signed_by" not in audit(signed_store).as_json()


def test_a_store_with_a_wrong_signature(signed_store: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    store = Path(shutil.copytree(signed_store, tmp_path / "s.zarr"))
    for use in uses_of_store(store, public(keys[1]), tmp_path):
        assert "and not by the trusted" in refusal(use, kind=GuaranteeViolation)
    for text, said in (
        (b"{}", "its signature is damaged"),
        (b"[" * 9999, "is not signed"),
        (b'{"public_key": 7, "signature": null}', "damaged"),
    ):
        (store / SIGNATURE).write_bytes(text)
        for use in uses_of_store(store, public(keys[0]), tmp_path):
            assert said in refusal(use, kind=GuaranteeViolation)
    # Another's signature under our name.
    sign(store, keys[1])
    theirs = json.loads((store / SIGNATURE).read_text())
    (store / SIGNATURE).write_text(json.dumps({**theirs, "public_key": public_key_of(public(keys[0]))}))
    message = refusal(uses_of_store(store, public(keys[0]), tmp_path)[0], kind=GuaranteeViolation)
    assert "is not what" in message
    (store / SIGNATURE).unlink()
    for use in uses_of_store(store, public(keys[0]), tmp_path):
        assert "is not signed; the owner of" in refusal(use, kind=GuaranteeViolation)


@pytest.mark.parametrize(
    "changed",
    [
        {"epsilon_per_km": 0.5}, {"metric_p": 1.0}, {"fingerprint": "0"}, {"quantisation_km": 0.0},
        {"chunk_hashes": {"digest": "0" * 64}},
    ],
)  # fmt: skip
def test_what_is_signed(
    changed: dict[str, Any], signed_store: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    store = Path(shutil.copytree(signed_store, tmp_path / "s.zarr"))
    MechanismStore.open(str(store), mode="r+").update(**changed)
    refusal(lambda: open_mechanism(store, trusted_key=public(keys[0])), kind=GuaranteeViolation)


def test_a_signature_is_of_the_bytes(signed_store: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    store = Path(shutil.copytree(signed_store, tmp_path / "s.zarr"))
    flip_a_bit(next(path for path in (store / "probability" / "c").rglob("*") if path.is_file()))
    message = refusal(lambda: open_mechanism(store, trusted_key=public(keys[0])), kind=GuaranteeViolation)
    assert "has changed since it was certified" in message
    refusal(lambda: sign(store, keys[0]), kind=GuaranteeViolation)


@pytest.mark.parametrize("packing", ["seed", "rows"])
def test_cities_are_signed_whole(packing: str, keys: tuple[Path, Path], tmp_path: Path) -> None:
    city, ours = write_city(tmp_path / "c.mdp", packing), public(keys[0])
    plain = open_city(city)
    refused = [(city, "is not signed")]
    signed = Path(shutil.copy(city, tmp_path / "signed.mdp"))
    assert sign(signed, keys[0])["public_key"] == public_key_of(ours)
    before = signed.read_bytes()
    again = open_city(signed, trusted_key=ours)
    assert again.facts["signature"]["public_key"] == public_key_of(ours)
    assert (again.row(**PLACE) == plain.row(**PLACE)).all()
    assert audit(signed, trusted_key=str(ours)).holds
    sign(signed, keys[0])
    assert signed.read_bytes() == before

    def swap(header: dict[str, Any], _: list[bytes]) -> None:
        header["rows_sha256"].reverse()

    changes: list[Change] = [
        put("epsilon_per_km", value=1.5), put("grid", "west_km", value=-4.0),
        put("remap", value=[3, 3, 3, 3]), put("plane_fit", "x", 0, 0, value=0.0),
        put("attribution", value="somebody"), put("signature", "signature", value="0" * 128), swap,
    ]  # fmt: skip
    for number, change in enumerate(changes):
        refused.append((rewritten(signed, tmp_path / f"{number}.mdp", change), "is not what"))
    for path, said in refused:
        for use in (open_city, audit):
            assert said in refusal(partial(use, path, trusted_key=ours), kind=GuaranteeViolation)
    sign(signed, keys[1])
    assert "is signed by" in refusal(lambda: open_city(signed, trusted_key=ours), kind=GuaranteeViolation)


def test_keys_are_files_that_are_never_overwritten(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key"
    made = call(capfd, "signing-key", file)
    assert made["public_key"] == public_key_of(made["public_path"])
    assert file.stat().st_mode & 0o777 == 0o600
    assert SigningKey.read(file).public_key == made["public_key"]
    assert SigningKey.read(file).secret.hex() not in repr(SigningKey.read(file))
    assert "exists; a key is never overwritten" in refusal(lambda: new_signing_key(file), kind=DataError)
    public(file).unlink()
    assert "exists" in refusal(lambda: new_signing_key(file), kind=DataError)
    assert not public(file).exists()
    for wrong in (b"", b"{}", b"[1", b"[" * 99999, b'{"format": 1}', file.read_bytes().replace(b"a", b"b")):
        bad = tmp_path / "bad"
        bad.write_bytes(wrong)
        bad.chmod(0o600)
        assert "no signing key" in refusal(partial(SigningKey.read, bad), kind=DataError)
        assert "is no public key" in refusal(partial(public_key_of, bad), kind=DataError)
    file.chmod(0o644)
    assert "chmod 600" in refusal(lambda: SigningKey.read(file), kind=DataError)
    assert "cannot be read" in refusal(lambda: public_key_of(tmp_path / "none"), kind=DataError)


def test_the_commands(tmp_path: Path, keys: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    city = write_city(tmp_path / "c.mdp")
    assert call(capfd, "sign", city, "--key", keys[0])["kind"] == "city"
    assert call(capfd, "audit", city, "--trusted-key", public(keys[0]))["holds"] is True
    call(capfd, "audit", city, "--trusted-key", public(keys[1]), code=1)
    (tmp_path / "rows.csv").write_text("x_km,y_km,0,1\n0,0,0.5,0.5\n1,0,0.5,0.5\n")
    array = tmp_path / "rows.csv"
    wrong = refusal(lambda: audit(array, epsilon_per_km=1.0, trusted_key="0" * 64), kind=SpecError)
    assert "only mechanism stores and cities are signed" in wrong


def test_newer_keys_say_to_upgrade(keys: tuple[Path, Path], tmp_path: Path) -> None:
    newest = "newer than 1, the newest that is read here; upgrade mdpext-dask"
    secret, known = shutil.copy(keys[0], tmp_path / "k"), shutil.copy(public(keys[0]), tmp_path / "k.pub")
    for key in secret, known:
        key.write_text(key.read_text().replace("version 1", "version 2"))
    refusal(lambda: SigningKey.read(secret), f"has signing key format 2, {newest}")
    refusal(lambda: public_key_of(known), f"has public key format 2, {newest}")
