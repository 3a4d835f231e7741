"""Certificates, keys and CAs loaded from files: a file that cannot be used raises a one-line error with its name."""

import ssl
import subprocess

import pytest

from django_faktory.brokers import tls
from tests.server.raw import CERTIFICATE

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Create a folder with usable and unusable files: a certificate alone, keys of other kinds, junk."""
    folder = tmp_path_factory.mktemp("pem")
    both = CERTIFICATE.read_text()
    head = "-----BEGIN CERTIFICATE-----"
    certificate = (
        head + both.partition(head)[2].partition("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----\n"
    )
    (folder / "certificate").write_text(certificate)
    (folder / "key").write_text(both.replace(certificate, ""))
    for kind, options in {"other": ["-algorithm", "ED25519"], "rsa": ["-algorithm", "RSA"]}.items():
        subprocess.run(["openssl", "genpkey", *options, "-out", folder / kind], check=True, capture_output=True)
    locked = ["openssl", "pkey", "-in", folder / "key", "-aes128", "-passout", "pass:x", "-out", folder / "locked"]
    subprocess.run(locked, check=True, capture_output=True)
    (folder / "junk").write_text("junk")
    (folder / "damaged").write_text((folder / "key").read_text().replace("M", "N"))
    (folder / "folder").mkdir()
    return folder


@pytest.mark.parametrize(("certificate", "key"), [("both", ""), ("certificate", "key"), ("both", "both")])
def test_a_certificate_with_its_key_creates_a_server_context(files, certificate, key):
    (files / "both").write_text(CERTIFICATE.read_text())
    context = tls.server_context(str(files / certificate), key and str(files / key))
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        ("missing", "key", "a certificate at {}/missing, got: No such file"),
        ("certificate", "missing", "a private key at {}/missing, got: No such file"),
        ("folder", "key", "a certificate at {}/folder, got: Is a directory"),
        ("a\x00b", "key", "null byte"),
        ("junk", "key", "expected a certificate (PEM) in {}/junk, found none"),
        ("certificate", "", "private key (PEM) in {}/certificate, found none"),
        ("certificate", "junk", "private key (PEM) in {}/junk, found none"),
        ("certificate", "other", "{0}/other does not belong to the certificate in {0}/certificate"),
        ("certificate", "rsa", "{0}/rsa does not belong to the certificate in {0}/certificate"),
        ("certificate", "damaged", "{0}/damaged does not belong to the certificate in {0}/certificate, or is damaged"),
        ("certificate", "locked", "without a passphrase in {}/locked"),
    ],
)
def test_an_unusable_file_raises_a_one_line_error_with_its_name(files, certificate, key, words):
    with pytest.raises(tls.UnusableFile) as caught:
        tls.server_context(str(files / certificate), key and str(files / key))
    assert words.format(files) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_an_unreadable_file_raises_an_error_with_its_name():
    with pytest.raises(tls.UnusableFile, match="/proc/self/mem"):
        tls.server_context("/proc/self/mem")


@pytest.mark.parametrize(("name", "words"), [("missing", "No such file"), ("junk", "expected a CA's certificate")])
def test_an_unusable_ca_file_raises_an_error_with_its_name(files, name, words):
    with pytest.raises(tls.UnusableFile, match=words) as caught:
        tls.client_context(str(files / name))
    assert str(files / name) in str(caught.value)


def test_a_client_context_always_verifies_certificate_and_host_name():
    for context in (tls.client_context(), tls.client_context(str(CERTIFICATE))):
        assert context.check_hostname
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert len(tls.client_context(str(CERTIFICATE)).get_ca_certs()) == 1, "and no other authority"
