"""A certificate that is refused: the message names the file of authorities in use, what names it, and a cure."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from streaming.errors import ConfigError
from streaming.storage import Storage
from streaming.storage.adapters.certificates import why_refused
from streaming.storage.adapters.credentials import azure_config, s3_access
from streaming.storage.base.adapter import UnreachableError
from streaming.storage.base.options import StorageOptions
from tests.support.servers.tls import openssl, self_signed, served_over_tls
from tests.support.tiers import first_here

BODY = b"body"
FOR_LOCALHOST = "subjectAltName=DNS:localhost"
NO_AUTHORITY = "basicConstraints=critical,CA:FALSE"
IMPATIENT = {"unreachable_s": 0.0, "max_retries": 0}


def said(url: str, ca_file: Path | None) -> str:
    options = IMPATIENT if ca_file is None else {**IMPATIENT, "ca_file": str(ca_file)}
    with pytest.raises(UnreachableError) as caught:
        Storage(options).info(f"{url}/x.tar")
    return str(caught.value)


@pytest.mark.thorough
@pytest.mark.parametrize("named_by", first_here(["AWS_CA_BUNDLE", "storage option ca_file", ""], 1))
def test_the_message_names_the_file_that_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_by: str
) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    cert, key = self_signed(tmp_path, "one", FOR_LOCALHOST, NO_AUTHORITY)
    other, _ = self_signed(tmp_path, "other")
    if named_by == "AWS_CA_BUNDLE":
        monkeypatch.setenv(named_by, str(other))
    with served_over_tls(BODY, cert, key) as url:
        message = said(url, other if named_by.startswith("storage") else None)
    assert "not trusted; give its authority as ca_file, or --ca-file to a command" in message
    assert (f"those in {other} ({named_by})" in message) == bool(named_by)


@pytest.mark.thorough
def test_a_certificate_of_an_authority_is_no_servers_and_the_command_makes_one_that_is(tmp_path: Path) -> None:
    """``openssl req -x509`` alone makes an authority, which no option has believed as a server."""
    cert, key = self_signed(tmp_path, "plain", FOR_LOCALHOST)
    with served_over_tls(BODY, cert, key) as url:
        message = said(url, cert)
    assert f"although {cert} (storage option ca_file) was read" in message
    found = re.search(r"`openssl (.*?)`", message)
    assert found is not None
    openssl(*shlex.split(found[1]), cwd=tmp_path)
    made = tmp_path / "tls.crt"
    with served_over_tls(BODY, made, tmp_path / "tls.key") as url:
        assert Storage({"ca_file": str(made)}).info(f"{url}/x.tar").size_bytes == len(BODY)


def test_a_certificate_for_another_name_is_said_to_be_that(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path, "away", "subjectAltName=DNS:elsewhere,IP:10.0.0.7", NO_AUTHORITY)
    with served_over_tls(BODY, cert, key) as url:
        assert "its certificate is for elsewhere, 10.0.0.7, not for localhost" in said(url, cert)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("InvalidCertificate(Expired)", "has expired; have it renewed, or set the clock"),
        ("InvalidCertificate(ExpiredContext { time: 1, not_after: 0 })", "has expired"),
        ("InvalidCertificate(NotValidYetContext { time: 1 })", "is not valid yet"),
        ("InvalidCertificate(Other(OtherError(CaUsedAsEndEntity)))", "subjectAltName=IP:10.0.0.1 "),
        ("InvalidCertificate(UnknownIssuer)", "not trusted"),
    ],
)
def test_each_reason_has_its_words(reason: str, words: str) -> None:
    assert words in why_refused(reason, "https://10.0.0.1:9000", "")


@pytest.mark.parametrize("url", ["https://localhost:1/x.tar", "s3://b/x.tar", "gs://b/x.tar", "az://b/x.tar"])
@pytest.mark.parametrize("named_by", ["storage option ca_file", "AWS_CA_BUNDLE"])
@pytest.mark.parametrize("held", ["", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "\0\1binary"])
def test_a_file_without_certificates_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str, named_by: str, url: str
) -> None:
    path = tmp_path / "authorities"
    path.write_text(held)
    options: dict[str, object] = {**IMPATIENT, "account_name": "a"}
    if named_by == "AWS_CA_BUNDLE":
        monkeypatch.setenv(named_by, str(path))
    else:
        options["ca_file"] = str(path)
    with pytest.raises(ConfigError) as caught:
        Storage({**options, "anon": True}).info(url)
    assert f"no certificate in {path} ({named_by}): expected a PEM file" in str(caught.value)


@pytest.mark.parametrize("named_by", ["storage option ca_file", "AWS_CA_BUNDLE"])
def test_fsspec_refuses_such_a_file_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_by: str) -> None:
    path = tmp_path / "authorities"
    path.write_text("")
    options: dict[str, object] = {**IMPATIENT, "client": "fsspec", "key": "k", "secret": "s"}
    if named_by == "AWS_CA_BUNDLE":
        monkeypatch.setenv(named_by, str(path))
    else:
        options["ca_file"] = str(path)
    with pytest.raises(ConfigError, match=rf"no certificate in {path} \({named_by}\)"):
        Storage(options).info("s3://b/x")


def test_a_damaged_certificate_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "authorities"
    path.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(ConfigError, match=rf"a certificate in {path} \(storage option ca_file\) is damaged"):
        Storage({"ca_file": str(path)}).info("https://localhost:1/x.tar")


# --- keys of which a part is missing ---

AWS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}


@pytest.mark.parametrize("given", AWS)
@pytest.mark.parametrize("beside", [{}, {"AWS_WEB_IDENTITY_TOKEN_FILE": "/t"}, {"AWS_SECRET_ACCESS_KEY": ""}])
def test_half_a_key_of_s3_is_refused_by_the_name_that_is_missing(given: str, beside: dict[str, str]) -> None:
    (missing,) = AWS.keys() - {given}
    environ = {**beside, given: "x"}
    with pytest.raises(ConfigError, match=f"the environment has {given}, but not {missing}"):
        s3_access(StorageOptions(), environ)
    assert s3_access(StorageOptions(key="k", secret="s"), environ).provider is not None
    assert s3_access(StorageOptions(anon=True), environ).anonymous


@pytest.mark.parametrize("given", first_here(AWS, 1))
def test_half_a_key_in_the_environment_is_none_of_an_anonymous_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    for name in AWS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(given, "x")
    cert, key = self_signed(tmp_path, "one", FOR_LOCALHOST, NO_AUTHORITY)
    with served_over_tls(BODY, cert, key) as url:
        storage = Storage({"endpoint_url": url, "anon": True, "ca_file": str(cert)})
        assert bytes(storage.read("s3://b/x.tar", 0, 4)) == BODY


def test_half_a_key_of_azure_is_named() -> None:
    _, source = azure_config(StorageOptions(), {"AZURE_CLIENT_SECRET": "s", "AZURE_CLIENT_ID": "i"})
    assert "(the environment has AZURE_CLIENT_SECRET and AZURE_CLIENT_ID, but not AZURE_TENANT_ID)" in source
    _, source = azure_config(StorageOptions(), {"AZURE_CLIENT_ID": "i"})
    assert "the environment has" not in source
    with pytest.raises(ConfigError, match="the storage account has no name; give account_name"):
        Storage({"account_key": "QUJD"}).info("az://container/key")


def test_a_key_file_of_google_that_is_not_there_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/not/there")
    for options in ({}, {"anon": True}):
        with pytest.raises(ConfigError, match="GOOGLE_APPLICATION_CREDENTIALS: no such file: /not/there"):
            Storage(options).info("gs://b/x")
