"""Certificates and keys of a federation: who may join, and how each side knows the other.

    KEYS/ca.key, KEYS/ca.crt        make further certificates; keep ca.key offline
    KEYS/server/                    for the coordinator: ca.crt, server.crt, server.key, sites/NAME.pub,
                                    revoked/NAME.SHA.pub
    KEYS/sites/NAME/                for one site: ca.crt, site.key, site.json (its name and the coordinator's address)

A site knows the coordinator by a certificate of this CA; the coordinator knows a site by its public key.
"""

import glob
import hashlib
import ipaddress
import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedx_pl.errors import UserError, short
from fedx_pl.files import write_atomically
from fedx_pl.files.reading import read_json

YEARS = 5
RENEW_DAYS = 30  # before its end, a certificate is made anew when keys are made
AUTHORITY = "fedx-pl federation"  # name of the CA


@dataclass(frozen=True, kw_only=True)
class SiteKeys:
    """What a site holds."""

    name: str
    server: str  # HOST:PORT
    ca: Path
    private: ec.EllipticCurvePrivateKey


@dataclass(frozen=True, kw_only=True)
class ServerKeys:
    """What the coordinator holds."""

    ca: Path
    certificate: Path
    key: Path
    sites: dict[str, bytes]  # public keys (PEM) by name
    revoked: dict[str, float] = field(
        default_factory=dict
    )  # when a site's last revoked key was, by name


def make(folder: Path, host: str, port: int, sites: Sequence[str]) -> list[str]:
    """Makes the CA, the coordinator's certificate and a key for each site; what is there already stays.

    Args:
        folder: where to put everything.
        host: the name or address by which sites reach the coordinator.
        port: of the coordinator.
        sites: names of sites, old ones or new.

    Returns:
        Lines that tell what goes where.
    """
    for name in sites:
        require_site_name("--sites", name)
    address = _general_name(host)
    place = (
        f"[{host}]:{port}" if isinstance(address.value, ipaddress.IPv6Address) else f"{host}:{port}"
    )
    authority, ca, renewed = _authority(folder)
    _server(folder / "server", host, authority, ca=ca)
    lines = []
    if renewed:
        for old in (folder / "sites").glob("*/ca.crt"):
            write_atomically(old, _pem(ca))
        lines.append(
            f"{folder / 'ca.crt'}: was about to end and is new; send it to every site, in place of its ca.crt"
        )
    lines += [
        f"{folder / 'server'}: for the coordinator ({host}); fedx-pl federate server ... --keys {folder / 'server'}"
    ]
    for name in sites:
        _site(folder, name, place, ca=ca)
        own = folder / "sites" / name
        lines.append(
            f"{own}: for {name} alone; fedx-pl federate client --data IMAGES --keys {own.name}"
        )
    lines.append(f"{folder / 'ca.key'}: makes further keys; keep it offline")
    return lines


def revoke(folder: Path, sites: Sequence[str]) -> list[str]:
    """Takes sites' keys back: the coordinator does not know them any more, and the next ones are new.

    Args:
        folder: of `make`; the coordinator's part of it is enough.
        sites: their names.

    Returns:
        Lines that tell what follows.
    """
    known = {file.stem: file for file in sorted((folder / "server" / "sites").glob("*.pub"))}
    for name in sites:
        if name not in known:
            raise UserError(
                f"--revoke {name}: {folder / 'server' / 'sites'} has no key of that name; it has "
                f"{', '.join(known) or 'none'}"
            )
    lines = []
    for name in sites:
        public = _read_public(known[name])
        write_atomically(folder / "server" / "revoked" / f"{name}.{_short(public)}.pub", public)
        known[name].unlink()
        shutil.rmtree(folder / "sites" / name, ignore_errors=True)
        lines.append(
            f"{name}: its key is revoked; start the coordinator's command again, and the run goes on without it. "
            f"fedx-pl federate keys --sites {name} makes a new key"
        )
    return lines


def known_host(folder: Path) -> str:
    """By which sites reach the coordinator, as said when its certificate was made; empty if there is none."""
    file = folder / "server" / "server.crt"
    return _names(_read_certificate(file))[0] if file.exists() else ""


def require_site_name(source: str, name: str) -> None:
    """Raises a `UserError` unless a site's name can be part of a file's.

    Args:
        source: the option that it is from.
        name: of the site.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
        raise UserError(
            f"{source} {short(name)}: a site's name has letters, digits, dots and dashes, e.g. hospital-a"
        )


def load_site(folder: Path) -> SiteKeys:
    """Reads a site's folder."""
    try:
        about = read_json(folder / "site.json")
        name, server = str(about["name"]), str(about["server"])
        require_site_name(f"--keys {folder}", name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if meant := _site_folders_near(folder):
            raise UserError(
                f"--keys {folder} does not hold a site's keys; did you mean --keys {' or '.join(map(str, meant))}?"
            ) from error
        raise UserError(
            f"--keys {folder} does not hold a site's keys ({error}); `fedx-pl federate keys` makes them on the "
            f"coordinator, in KEYS/sites/NAME"
        ) from error
    private = read_private(folder / "site.key")
    _require_valid(folder / "ca.crt", instead="ask the coordinator for its ca.crt of today")
    return SiteKeys(name=name, server=server, ca=folder / "ca.crt", private=private)


def _site_folders_near(folder: Path) -> list[Path]:
    """Folders of sites' keys that may be meant: ``keys/sites/NAME`` for ``NAME``, or those within the folder."""
    name = glob.escape(folder.name)
    found = [
        *folder.glob("*/site.json"),
        *folder.glob("sites/*/site.json"),
        *folder.glob("*/sites/*/site.json"),
    ]
    if name:
        found += [
            *folder.parent.glob(f"sites/{name}/site.json"),
            *folder.parent.glob(f"*/sites/{name}/site.json"),
        ]
    return sorted({file.parent for file in found})[:5]


def load_server(folder: Path) -> ServerKeys:
    """Reads the coordinator's folder."""
    files = [folder / name for name in ("ca.crt", "server.crt", "server.key")]
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(
            f"{missing[0]} is missing; type fedx-pl federate keys --host THIS_HOST --sites NAME,NAME, or --insecure "
            f"to try things out on this machine"
        )
    ca, certificate, key = files
    renew = "type fedx-pl federate keys --sites NAME, of a site that is known: it makes a new one"
    for file in (ca, certificate):
        _require_valid(file, instead=renew)
    private, own = read_private(key), _read_certificate(certificate)
    if _public_bytes(own.public_key()) != public_pem(private):
        raise UserError(f"{certificate} is not the certificate of {key}; put both back, or {renew}")
    try:
        own.verify_directly_issued_by(_read_certificate(ca))
    except (ValueError, TypeError, InvalidSignature) as error:
        raise UserError(
            f"{certificate} is not of the CA in {ca}; put both back, or {renew}"
        ) from error
    public = {file.stem: _read_public(file) for file in sorted((folder / "sites").glob("*.pub"))}
    if not public:
        raise UserError(
            f"{folder / 'sites'} holds no site's key; type fedx-pl federate keys --sites NAME,NAME"
        )
    owners: dict[bytes, str] = {}
    revoked = _revoked(folder)
    for name, content in public.items():
        if (other := owners.setdefault(content, name)) != name:
            raise UserError(
                f"{folder / 'sites'}: {other} and {name} have the same key; each site needs its own"
            )
        if content in revoked:
            raise UserError(
                f"{folder / 'sites' / name}.pub is a key that was revoked; remove it, then type fedx-pl federate keys "
                f"--sites {name} for a new one"
            )
    when: dict[str, float] = {}
    for file in revoked.values():
        name = file.stem.rpartition(".")[0]
        when[name] = max(when.get(name, 0.0), file.stat().st_mtime)
    return ServerKeys(ca=ca, certificate=certificate, key=key, sites=public, revoked=when)


def public_pem(private: ec.EllipticCurvePrivateKey) -> bytes:
    """The public half."""
    return _public_bytes(private.public_key())


def _public_bytes(public: Any) -> bytes:
    plain = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(public.public_bytes(serialization.Encoding.PEM, plain))


def _revoked(folder: Path) -> dict[bytes, Path]:
    """Revoked public keys of a coordinator's folder, and their files."""
    return {_read_public(file): file for file in sorted((folder / "revoked").glob("*.pub"))}


def _short(public: bytes) -> str:
    return hashlib.sha256(public).hexdigest()[:16]


def _authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate, bool]:
    """The CA's key and certificate, and whether that is a new one for the key it had."""
    key_file, certificate_file = folder / "ca.key", folder / "ca.crt"
    if any(
        (folder / name).exists() for name in ("ca.crt", "server", "sites")
    ):  # Another CA would make them useless.
        if not key_file.exists() or not certificate_file.exists():
            raise UserError(
                f"{key_file} and {certificate_file.name} are needed to make further keys; put them back, or choose "
                f"another --out"
            )
        private, certificate = read_private(key_file), _read_certificate(certificate_file)
        if not _ends_soon(certificate):
            return private, certificate, False
        certificate = _signed_by_itself(private)
        write_atomically(certificate_file, _pem(certificate))
        return private, certificate, True
    private = ec.generate_private_key(ec.SECP384R1())
    certificate = _signed_by_itself(private)
    _write_secret(key_file, private)
    write_atomically(
        certificate_file, _pem(certificate)
    )  # Last: with it, the authority is complete.
    return private, certificate, False


def _signed_by_itself(private: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = _name(AUTHORITY)
    builder = _certificate(name, name, private).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), True
    )
    usage = x509.KeyUsage(
        False, False, False, False, False, True, True, False, False
    )  # signs certificates and CRLs
    return builder.add_extension(usage, True).sign(private, hashes.SHA384())


def _server(
    folder: Path, host: str, authority: ec.EllipticCurvePrivateKey, ca: x509.Certificate
) -> None:
    file = folder / "server.crt"
    write_atomically(folder / "ca.crt", _pem(ca))
    before = _names(_read_certificate(file)) if file.exists() else []
    if host in before and not _ends_soon(_read_certificate(file)):
        return
    private = ec.generate_private_key(ec.SECP384R1())
    names = x509.SubjectAlternativeName(
        [_general_name(one) for one in dict.fromkeys([*before, host, "localhost", "127.0.0.1"])]
    )
    builder = _certificate(_name(host), ca.subject, private).add_extension(names, False)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    certificate = builder.add_extension(identifier, False).sign(authority, hashes.SHA384())
    _write_secret(folder / "server.key", private)
    write_atomically(file, _pem(certificate))


def _site(folder: Path, name: str, server: str, ca: x509.Certificate) -> None:
    place = folder / "sites" / name
    revoked = _revoked(folder / "server")
    if not (place / "site.key").exists() or public_pem(read_private(place / "site.key")) in revoked:
        _write_secret(place / "site.key", ec.generate_private_key(ec.SECP384R1()))
    private = read_private(place / "site.key")
    write_atomically(folder / "server" / "sites" / f"{name}.pub", public_pem(private))
    write_atomically(place / "ca.crt", _pem(ca))
    write_atomically(place / "site.json", json.dumps({"name": name, "server": server}).encode())


def _certificate(
    subject: x509.Name, issuer: x509.Name, private: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now, public = datetime.now(UTC), private.public_key()
    builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(
        now + timedelta(days=365 * YEARS)
    )
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _general_name(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    label = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
    if (
        len(host) > 253
        or not re.fullmatch(rf"{label}(\.{label})*\.?", host)
        or re.fullmatch(r"[0-9.]+", host)
    ):
        raise UserError(
            f"--host {host}: is no host name or address; type the name or address by which sites reach this machine, "
            f"e.g. --host coordinator.example.org"
        )
    return x509.DNSName(host)


def _names(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def read_private(file: Path) -> ec.EllipticCurvePrivateKey:
    """Reads a private key of the kind that `make` makes, if nobody else can."""
    try:
        content = file.read_bytes()
        private = serialization.load_pem_private_key(content, password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(
            f"{file} is not a readable key ({_line(error)}); `fedx-pl federate keys` makes one"
        ) from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or not isinstance(
        private.curve, ec.SECP384R1
    ):
        raise UserError(
            f"{file} is not an elliptic-curve key (P-384); `fedx-pl federate keys` makes one"
        )
    if os.name == "posix" and file.stat().st_mode & 0o077:
        raise UserError(f"{file} can be read by others than its owner; type chmod 600 {file}")
    return private


def _read_public(file: Path) -> bytes:
    try:
        public = serialization.load_pem_public_key(file.read_bytes())
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{file} is not a public key; remove it or put it right") from error
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(
        public.curve, ec.SECP384R1
    ):
        raise UserError(
            f"{file} is not an elliptic-curve key (P-384); remove it, `fedx-pl federate keys` makes one"
        )
    return _public_bytes(public)


def _read_certificate(file: Path) -> x509.Certificate:
    """The first one in a file; a site's ca.crt may have that of a proxy behind it."""
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{file} is not a certificate ({_line(error)}); put it back from where keys were made"
        ) from error


def _require_valid(file: Path, instead: str) -> None:
    certificate, now = _read_certificate(file), datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        raise UserError(
            f"{file} has ended on {certificate.not_valid_after_utc:%Y-%m-%d}; {instead}"
        )
    if now < certificate.not_valid_before_utc:
        raise UserError(
            f"{file} begins on {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; see that this machine's clock "
            f"is right ({now:%Y-%m-%d %H:%M} UTC)"
        )


def _ends_soon(certificate: x509.Certificate) -> bool:
    return certificate.not_valid_after_utc < datetime.now(UTC) + timedelta(days=RENEW_DAYS)


def _line(error: Exception) -> str:
    """The first line of an error, which may be a page."""
    return str(error).partition("\n")[0][:100]


def _write_secret(file: Path, private: ec.EllipticCurvePrivateKey) -> None:
    """For the owner's eyes from the first byte on."""
    content = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # An older one may be open to others.
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as secret:
        secret.write(content)
