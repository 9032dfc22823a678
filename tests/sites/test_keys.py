"""Certificates and keys: what is created, who can read it, what is kept, and error messages."""

import json
import ssl
import stat
from ipaddress import ip_address
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs Flower: pip install -e '.[flower]'")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.verification import PolicyBuilder, Store

from fedx_pl.cli.main import main
from fedx_pl.errors import UserError
from fedx_pl.sites import certificates, keys


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def certificate(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def subject(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def test_everything_is_made_and_secrets_are_the_owner_s(tmp_path: Path) -> None:
    lines = keys.make(tmp_path, "coordinator.example.org", 8000, ["a", "hospital-b.2"])
    assert set(files(tmp_path)) == {
        "ca.key", "ca.crt", "server/ca.crt", "server/server.crt", "server/server.key",
        "server/sites/a.pub", "server/sites/hospital-b.2.pub",
        "sites/a/ca.crt", "sites/a/site.key", "sites/a/site.json",
        "sites/hospital-b.2/ca.crt", "sites/hospital-b.2/site.key", "sites/hospital-b.2/site.json",
    }  # fmt: skip
    secrets = list(tmp_path.rglob("*.key"))
    assert len(secrets) == 4
    assert {stat.S_IMODE(file.stat().st_mode) for file in secrets} == {0o600}
    assert any("--keys" in line and "hospital-b.2" in line for line in lines)
    assert any("ca.key" in line and "offline" in line for line in lines)


def test_a_secret_is_hidden_whatever_was_there_before(tmp_path: Path) -> None:
    keys.make(tmp_path, "old.example.org", 8000, ["a"])
    (tmp_path / "server" / "server.key").chmod(0o644)
    keys.make(
        tmp_path, "new.example.org", 8000, ["a"]
    )  # Another host: another certificate and key.
    assert stat.S_IMODE((tmp_path / "server" / "server.key").stat().st_mode) == 0o600


@pytest.mark.parametrize("host", ["coordinator.example.org", "192.0.2.7", "2001:db8::7"])
def test_the_certificate_is_the_ca_s_and_names_the_host(tmp_path: Path, host: str) -> None:
    """Checked by cryptography's path validation, and by OpenSSL, which is what sites use."""
    keys.make(tmp_path, host, 8000, ["a"])
    ca, own = (
        certificate(tmp_path / "sites" / "a" / "ca.crt"),
        certificate(tmp_path / "server" / "server.crt"),
    )
    own.verify_directly_issued_by(ca)
    assert (ca.not_valid_after_utc - ca.not_valid_before_utc).days == 365 * certificates.YEARS
    builder = PolicyBuilder().store(Store([ca]))
    for name in (host, "localhost", "127.0.0.1"):
        builder.build_server_verifier(subject(name)).verify(own, [])
    with pytest.raises(x509.verification.VerificationError):
        builder.build_server_verifier(subject("else.example.org")).verify(own, [])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(
        tmp_path / "server" / "server.crt", tmp_path / "server" / "server.key"
    )  # They match.


def test_a_second_call_keeps_the_old_keys_and_adds_sites(tmp_path: Path) -> None:
    keys.make(tmp_path, "host", 8000, ["a"])
    before = files(tmp_path)
    keys.make(tmp_path, "host", 8000, ["a", "b"])
    after = files(tmp_path)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {
        f"sites/b/{name}" for name in ("ca.crt", "site.key", "site.json")
    } | {"server/sites/b.pub"}
    assert after["sites/b/ca.crt"] == before["sites/a/ca.crt"]
    assert list(keys.load_server(tmp_path / "server").sites) == ["a", "b"]


def test_another_host_makes_another_certificate_of_the_same_ca(tmp_path: Path) -> None:
    keys.make(tmp_path, "old.example.org", 8000, ["a"])
    before = files(tmp_path)
    keys.make(tmp_path, "new.example.org", 9000, ["a"])
    own = certificate(tmp_path / "server" / "server.crt")
    own.verify_directly_issued_by(certificate(tmp_path / "ca.crt"))
    assert "new.example.org" in own.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    ).value.get_values_for_type(x509.DNSName)
    after = files(tmp_path)
    assert after["sites/a/site.key"] == before["sites/a/site.key"]
    assert json.loads(after["sites/a/site.json"]) == {"name": "a", "server": "new.example.org:9000"}


def test_a_coordinator_s_folder_that_was_moved_away_is_made_again_by_the_same_ca(
    tmp_path: Path,
) -> None:
    """`keys/server` was moved to the coordinator; the rest stayed beside ca.key."""
    folder = tmp_path / "keys"
    keys.make(folder, "host", 8000, ["a"])
    ca, public = (
        (folder / "ca.crt").read_bytes(),
        (folder / "server" / "sites" / "a.pub").read_bytes(),
    )
    (folder / "server").rename(tmp_path / "elsewhere")
    keys.make(folder, "host", 8000, ["a", "b"])
    assert (
        (folder / "ca.crt").read_bytes() == ca == (folder / "sites" / "b" / "ca.crt").read_bytes()
    )
    assert keys.load_server(folder / "server").sites["a"] == public


def test_without_ca_key_no_other_ca_is_put_in_its_place(tmp_path: Path) -> None:
    keys.make(tmp_path, "host", 8000, ["a"])
    (tmp_path / "ca.key").unlink()
    before = files(tmp_path)
    with pytest.raises(
        UserError, match=r"ca\.key and ca\.crt are needed .*put them back, or choose another --out"
    ):
        keys.make(tmp_path, "host", 8000, ["b"])
    assert files(tmp_path) == before


def test_a_site_s_folder_is_read_back(tmp_path: Path) -> None:
    keys.make(tmp_path, "host", 8123, ["a"])
    found, known = keys.load_site(tmp_path / "sites" / "a"), keys.load_server(tmp_path / "server")
    assert (found.name, found.server) == ("a", "host:8123")
    assert keys.public_pem(found.private) == known.sites["a"]
    assert found.ca.read_bytes() == known.ca.read_bytes()


def test_hosts_are_names_or_addresses(tmp_path: Path) -> None:
    keys.make(tmp_path / "six", "2001:db8::7", 8000, ["a"])
    assert keys.load_site(tmp_path / "six" / "sites" / "a").server == "[2001:db8::7]:8000"
    with pytest.raises(
        UserError, match=r"--host höst\.example\.org is .*by which sites reach this machine"
    ):
        keys.make(tmp_path / "keys", "höst.example.org", 8000, ["a"])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "a b", "ä", "x" * 64, "a\n"])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"e\.g\. hospital-a"):
        keys.make(tmp_path / "keys", "host", 8000, [name])
    assert not (tmp_path / "keys").exists()


def test_a_name_in_a_site_s_keys_that_is_no_file_name_is_refused(tmp_path: Path) -> None:
    """The site's private state is saved in a folder of that name."""
    (tmp_path / "site.json").write_text(json.dumps({"name": "../../x", "server": "host:8000"}))
    with pytest.raises(UserError, match=r"\.\./\.\./x: a site's name has letters"):
        keys.load_site(tmp_path)
    assert (
        main(["federate", "client", "--data", str(tmp_path), "--insecure", "--name", "../x"]) == 2
    )


def test_a_site_s_folder_is_found_where_the_keys_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.make(tmp_path / "keys", "host", 8000, ["site-a", "site-b"])
    monkeypatch.chdir(tmp_path)
    for wrong in ("site-a", "keys/site-a", "keys/server/../site-a"):
        with pytest.raises(UserError, match=r"did you mean --keys \S*keys\S*/sites/site-a\?"):
            keys.load_site(Path(wrong))
    for wrong in (".", "keys", "keys/sites"):
        with pytest.raises(
            UserError, match=r"did you mean --keys keys/sites/site-a or keys/sites/site-b\?"
        ):
            keys.load_site(Path(wrong))


def test_errors_about_wrong_folders_say_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"does not hold a site's keys .*fedx-pl federate keys.*KEYS/sites/NAME"
    ):
        keys.load_site(tmp_path)
    with pytest.raises(
        UserError, match=r"ca\.crt is missing; type fedx-pl federate keys --host .* or --insecure"
    ):
        keys.load_server(tmp_path)
    keys.make(tmp_path, "host", 8000, ["a"])
    (tmp_path / "server" / "sites" / "a.pub").unlink()
    with pytest.raises(UserError, match="holds no site's key; type fedx-pl federate keys --sites"):
        keys.load_server(tmp_path / "server")
    place = tmp_path / "sites" / "a"
    (place / "site.json").write_text("[]")
    with pytest.raises(UserError, match="does not hold a site's keys"):
        keys.load_site(place)
    keys.make(tmp_path, "host", 8000, ["a"])
    (place / "site.key").write_bytes(b"garbage")
    with pytest.raises(UserError, match=r"site\.key is not a readable key"):
        keys.load_site(place)
    other = rsa.generate_private_key(65537, 2048)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (place / "site.key").write_bytes(other.private_bytes(*form, serialization.NoEncryption()))
    with pytest.raises(UserError, match="not an elliptic-curve key"):
        keys.load_site(place)
    locked = ec.generate_private_key(ec.SECP384R1())
    (place / "site.key").write_bytes(
        locked.private_bytes(*form, serialization.BestAvailableEncryption(b"secret"))
    )
    with pytest.raises(UserError, match="not a readable key"):
        keys.load_site(place)


def test_a_revoked_key_never_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    keys.make(folder, "host", 8000, ["a", "b"])
    stolen = folder / "server" / "sites" / "b.pub"
    before, kept = stolen.read_bytes(), (folder / "sites" / "b" / "site.key").read_bytes()
    words = ["federate", "keys", "--out", str(folder)]
    assert main([*words, "--revoke", "b"]) == 0
    assert "fedx-pl federate keys --sites b makes a new key" in capsys.readouterr().out
    known = keys.load_server(folder / "server")
    assert (list(known.sites), list(known.revoked)) == (["a"], ["b"])
    # The old key lies where keys are made, or comes back with a copy of the coordinator's folder.
    (folder / "sites" / "b").mkdir()
    (folder / "sites" / "b" / "site.key").write_bytes(kept)
    (folder / "sites" / "b" / "site.key").chmod(0o600)
    assert main([*words, "--sites", "b"]) == 0
    known = keys.load_server(folder / "server")
    assert list(known.sites) == ["a", "b"]
    assert known.sites["b"] != before
    assert keys.public_pem(keys.load_site(folder / "sites" / "b").private) == known.sites["b"]
    stolen.write_bytes(before)
    with pytest.raises(
        UserError, match=r"b\.pub is a key that was revoked; remove it, then type .* --sites b"
    ):
        keys.load_server(folder / "server")


def test_revoking_says_whose_keys_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys.make(tmp_path, "host", 8000, ["a", "b"])
    before = files(tmp_path)
    assert main(["federate", "keys", "--out", str(tmp_path), "--revoke", "a,c"]) == 2
    assert "--revoke c: " in (error := capsys.readouterr().err)
    assert "it has a, b" in error
    assert files(tmp_path) == before
    assert main(["federate", "keys", "--out", str(tmp_path)]) == 2
    assert "--sites hospital-a,hospital-b, or --revoke hospital-a" in capsys.readouterr().err


def test_certificates_that_end_are_named_and_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "YEARS", 0)  # They end as they begin.
        keys.make(tmp_path, "host", 8000, ["a", "b"])
    site, server = tmp_path / "sites" / "a", tmp_path / "server"
    public = files(server / "sites")
    with pytest.raises(
        UserError,
        match=r"a/ca\.crt has expired on \d+-\d+-\d+; ask the coordinator for its present ca\.crt",
    ):
        keys.load_site(site)
    with pytest.raises(
        UserError,
        match=r"server/ca\.crt has expired on .*; type fedx-pl federate keys --sites NAME",
    ):
        keys.load_server(server)
    lines = keys.make(tmp_path, "host", 8000, ["a"])
    assert "send it to every site" in lines[0]
    keys.load_server(server)
    keys.load_site(site)
    keys.load_site(tmp_path / "sites" / "b")
    assert files(server / "sites") == public
    certificate(server / "server.crt").verify_directly_issued_by(
        certificate(tmp_path / "sites" / "b" / "ca.crt")
    )
    assert not any("send it" in line for line in keys.make(tmp_path, "host", 8000, ["a"]))
    with monkeypatch.context() as patch:  # Only the coordinator's ends.
        patch.setattr(certificates, "YEARS", 0)
        keys.make(tmp_path, "other", 8000, ["a"])
    with pytest.raises(UserError, match=r"server\.crt has expired on"):
        keys.load_server(server)
    keys.make(tmp_path, "other", 8000, ["a"])
    assert keys.load_server(server).sites


def test_garbage_gives_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys.make(tmp_path, "host", 8000, ["a"])
    words = ["federate", "keys", "--out", str(tmp_path), "--sites", "a"]
    for name in ("ca.crt", "server/server.crt", "ca.key"):
        before = (tmp_path / name).read_bytes()
        for garbage in (b"", b"nonsense\n" * 1000, before[:200], bytes(range(256))):
            (tmp_path / name).write_bytes(garbage)
            assert main(words) == 2
            error = capsys.readouterr().err.strip()
            assert f"{tmp_path / name} is not a " in error
            assert "\n" not in error
        (tmp_path / name).write_bytes(before)
    for name in ("ca.crt", "server.crt", "server.key"):
        before = (tmp_path / "server" / name).read_bytes()
        (tmp_path / "server" / name).write_bytes(b"nonsense")
        with pytest.raises(UserError, match=rf"{name} is not a .*(certificate|key) "):
            keys.load_server(tmp_path / "server")
        (tmp_path / "server" / name).write_bytes(before)
    (tmp_path / "sites" / "a" / "ca.crt").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"ca\.crt is not a certificate"):
        keys.load_site(tmp_path / "sites" / "a")


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    keys.make(tmp_path / "one", "host", 8000, ["a"])
    keys.make(tmp_path / "two", "host", 8000, ["a"])
    server = tmp_path / "one" / "server"
    for name, reason in (
        ("server.key", "is not the certificate of"),
        ("ca.crt", "is not one of the CA in"),
    ):
        before = (server / name).read_bytes()
        (server / name).write_bytes((tmp_path / "two" / "server" / name).read_bytes())
        with pytest.raises(UserError, match=reason):
            keys.load_server(server)
        (server / name).write_bytes(before)
    assert keys.load_server(server).sites


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606])
def test_keys_that_others_can_read_are_refused(tmp_path: Path, mode: int) -> None:
    keys.make(tmp_path, "host", 8000, ["a"])
    (tmp_path / "sites" / "a" / "site.key").chmod(mode)
    with pytest.raises(
        UserError, match=r"site\.key can be read by others .* type chmod 600 .*site\.key"
    ):
        keys.load_site(tmp_path / "sites" / "a")
    (tmp_path / "server" / "server.key").chmod(mode)
    with pytest.raises(UserError, match=r"server\.key can be read by others .* type chmod 600"):
        keys.load_server(tmp_path / "server")
    (tmp_path / "ca.key").chmod(mode)
    with pytest.raises(UserError, match=r"ca\.key can be read by others .* type chmod 600"):
        keys.make(tmp_path, "host", 8000, ["b"])


def test_only_the_kind_of_key_that_we_make(tmp_path: Path) -> None:
    keys.make(tmp_path, "host", 8000, ["a", "b"])
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    small = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "sites" / "a" / "site.key").write_bytes(
        small.private_bytes(*form, serialization.NoEncryption())
    )
    with pytest.raises(UserError, match="not an elliptic-curve key"):
        keys.load_site(tmp_path / "sites" / "a")
    for other in (
        small,
        rsa.generate_private_key(65537, 2048),
        ed25519.Ed25519PrivateKey.generate(),
    ):
        public = other.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (tmp_path / "server" / "sites" / "a.pub").write_bytes(public)
        with pytest.raises(UserError, match=r"a\.pub is not an elliptic-curve key \(P-384\)"):
            keys.load_server(tmp_path / "server")


@pytest.mark.parametrize(
    "host",
    [
        "https://host",
        "host:8000",
        "a b",
        "host/x",
        "-host",
        "a..b",
        "",
        "*.org",
        "1.2.3",
        "x" * 64,
        "a" * 300,
        "fe80::1%eth0",
        "fe80::1%$(reboot)",
    ],
)
def test_a_host_is_a_name_or_an_address(tmp_path: Path, host: str) -> None:
    with pytest.raises(UserError, match="is not a host name or address; type"):
        keys.make(tmp_path / "keys", host, 8000, ["a"])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("name", [".", "..", "a b", "\x1b[2J", "-x", "x" * 100])
def test_names_of_files_that_are_no_site_s_are_refused(tmp_path: Path, name: str) -> None:
    """Revoking `..` would delete the folder of all keys."""
    keys.make(tmp_path, "host", 8000, ["a"])
    sites = tmp_path / "server" / "sites"
    (sites / f"{name}.pub").write_bytes((sites / "a.pub").read_bytes())
    for attempt in (
        lambda: keys.load_server(tmp_path / "server"),
        lambda: keys.revoke(tmp_path, [name]),
    ):
        with pytest.raises(UserError, match="a site's name has letters, digits, dots and dashes"):
            attempt()
    assert (tmp_path / "ca.key").exists()


def test_a_key_without_end_is_not_read(tmp_path: Path) -> None:
    keys.make(tmp_path, "host", 8000, ["a"])
    place = tmp_path / "sites" / "a"
    for name, what in (("site.key", "a readable key"), ("ca.crt", "a certificate")):
        before = (place / name).read_bytes()
        (place / name).unlink()
        (place / name).symlink_to("/dev/zero")
        with pytest.raises(UserError, match=rf"{name} is not {what} \(.*not a regular file"):
            keys.load_site(place)
        (place / name).unlink()
        (place / name).write_bytes(before + b"\n" * certificates.MAX_FILE)
        (place / name).chmod(0o600)
        with pytest.raises(UserError, match=rf"{name} is not {what} \(it has 1,000,\d+ bytes"):
            keys.load_site(place)
        (place / name).write_bytes(before)
    assert keys.load_site(place).name == "a"


def test_each_site_has_a_key_of_its_own(tmp_path: Path) -> None:
    keys.make(tmp_path, "host", 8000, ["a", "b"])
    sites = tmp_path / "server" / "sites"
    (sites / "b.pub").write_bytes((sites / "a.pub").read_bytes())
    with pytest.raises(UserError, match="a and b have the same key; each site needs its own"):
        keys.load_server(tmp_path / "server")
    (sites / "b.pub").write_text("nonsense")
    with pytest.raises(UserError, match=r"b\.pub is not a public key"):
        keys.load_server(tmp_path / "server")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "federate",
        "keys",
        "--out",
        str(tmp_path / "keys"),
        "--host",
        "host",
        "--port",
        "9000",
    ]
    assert main([*words, "--sites", " a, b,"]) == 0
    assert sorted(file.name for file in (tmp_path / "keys" / "sites").iterdir()) == ["a", "b"]
    assert "fedx-pl federate client --data IMAGES --keys a" in capsys.readouterr().out
    for port in ("0", "-1", "65536"):
        assert main([*words[:-1], port, "--sites", "a"]) == 2
        assert f"--port={port} is not possible; type --port 8000" in capsys.readouterr().err
    assert main([*words, "--sites", "../a"]) == 2
    assert "error: --sites ../a" in capsys.readouterr().err
