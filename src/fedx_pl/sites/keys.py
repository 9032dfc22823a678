"""The key folders of a federation: who may join, and how each side knows the other.

    KEYS/ca.key, KEYS/ca.crt    make further certificates; keep ca.key offline
    KEYS/server/                for the coordinator: ca.crt, server.crt, server.key,
                                sites/NAME.pub, revoked/NAME.SHA.pub
    KEYS/sites/NAME/            for one site: ca.crt, site.key, and site.json with its name and the
                                coordinator's address

A site knows the coordinator by a certificate of this CA; the coordinator knows a site by its public
key.
"""

import glob
import hashlib
import ipaddress
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec

from fedx_pl.errors import UserError, short
from fedx_pl.files import write_atomically
from fedx_pl.files.reading import read_json
from fedx_pl.sites.certificates import (
    authority_certificate,
    certificate_pem,
    expires_soon,
    general_name,
    hosts_of,
    new_private,
    public_bytes,
    public_pem,
    read_certificate,
    read_private,
    read_public,
    require_valid,
    server_certificate,
    write_private,
)


@dataclass(frozen=True, kw_only=True)
class SiteKeys:
    """The keys and certificates of a site."""

    name: str
    server: str  # HOST:PORT
    ca: Path
    private: ec.EllipticCurvePrivateKey


@dataclass(frozen=True, kw_only=True)
class ServerKeys:
    """The keys and certificates of the coordinator."""

    ca: Path
    certificate: Path
    key: Path
    sites: dict[str, bytes]  # public keys (PEM) by name
    # By the name of a site, the time when its last key was revoked.
    revoked: dict[str, float] = field(default_factory=dict)


def make(folder: Path, host: str, port: int, sites: Sequence[str]) -> list[str]:
    """Makes the CA, the coordinator's certificate and a key for each site; keeps existing ones.

    Args:
        folder: where to put everything.
        host: the name or address by which sites reach the coordinator.
        port: the coordinator's port.
        sites: the names of sites, old or new.

    Returns:
        Lines that tell what goes where.
    """
    for name in sites:
        require_site_name("--sites", name)
    address = general_name(host)
    place = (
        f"[{host}]:{port}" if isinstance(address.value, ipaddress.IPv6Address) else f"{host}:{port}"
    )
    authority, ca, renewed = _authority(folder)
    _server(folder / "server", host, authority, ca=ca)
    lines = []
    if renewed:
        for old in (folder / "sites").glob("*/ca.crt"):
            write_atomically(old, certificate_pem(ca))
        lines.append(
            f"{folder / 'ca.crt'}: was about to expire and is renewed; send it to every site, in "
            "place of its ca.crt"
        )
    lines += [
        f"{folder / 'server'}: for the coordinator ({host}); fedx-pl federate server ... --keys "
        f"{folder / 'server'}"
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
    """Revokes the keys of sites. The coordinator will never accept them again.

    Args:
        folder: the folder of `make`; the coordinator's part of it is enough.
        sites: the names of the sites.

    Returns:
        Lines that tell what follows.
    """
    known = _public_files(folder / "server")
    for name in sites:
        if name not in known:
            raise UserError(
                f"--revoke {name}: {folder / 'server' / 'sites'} has no key of that name; it has "
                f"{', '.join(known) or 'none'}"
            )
    lines = []
    for name in sites:
        public = read_public(known[name])
        write_atomically(folder / "server" / "revoked" / f"{name}.{_short(public)}.pub", public)
        known[name].unlink()
        shutil.rmtree(folder / "sites" / name, ignore_errors=True)
        lines.append(
            f"{name}: its key is revoked; start the coordinator's command again to resume without "
            f"it. fedx-pl federate keys --sites {name} makes a new key"
        )
    return lines


def known_host(folder: Path) -> str:
    """The host of the coordinator's certificate; empty if there is none."""
    file = folder / "server" / "server.crt"
    return hosts_of(read_certificate(file))[0] if file.exists() else ""


def require_site_name(source: str, name: str) -> None:
    """Raises a `UserError` unless a site's name can be part of a file name.

    Args:
        source: the option or file that it is from.
        name: the name of the site.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
        raise UserError(
            f"{source} {short(name)}: a site's name has letters, digits, dots and dashes, e.g. "
            "hospital-a"
        )


def load_site(folder: Path) -> SiteKeys:
    """Reads a site's folder."""
    try:
        about = read_json(folder / "site.json")
        name = str(about["name"])
        server = str(about["server"])
        require_site_name(f"--keys {folder}", name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if meant := _site_folders_near(folder):
            raise UserError(
                f"--keys {folder} does not hold a site's keys; did you mean --keys "
                f"{' or '.join(map(str, meant))}?"
            ) from error
        raise UserError(
            f"--keys {folder} does not hold a site's keys ({error}); `fedx-pl federate keys` makes "
            "them on the coordinator, in KEYS/sites/NAME"
        ) from error
    private = read_private(folder / "site.key")
    require_valid(folder / "ca.crt", instead="ask the coordinator for its present ca.crt")
    return SiteKeys(name=name, server=server, ca=folder / "ca.crt", private=private)


def _site_folders_near(folder: Path) -> list[Path]:
    """Folders of sites' keys that may be meant: ``keys/sites/NAME``, or those in the folder."""
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
            f"{missing[0]} is missing; type fedx-pl federate keys --host THIS_HOST --sites "
            "NAME,NAME, or --insecure to try things out on this machine"
        )
    ca, certificate, key = files
    renew = "type fedx-pl federate keys --sites NAME, with a site that is known: it renews it"
    for file in (ca, certificate):
        require_valid(file, instead=renew)
    private = read_private(key)
    own = read_certificate(certificate)
    if public_bytes(own.public_key()) != public_pem(private):
        raise UserError(f"{certificate} is not the certificate of {key}; put both back, or {renew}")
    try:
        own.verify_directly_issued_by(read_certificate(ca))
    except (ValueError, TypeError, InvalidSignature) as error:
        raise UserError(
            f"{certificate} is not one of the CA in {ca}; put both back, or {renew}"
        ) from error
    public = {name: read_public(file) for name, file in _public_files(folder).items()}
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
                f"{folder / 'sites' / name}.pub is a key that was revoked; remove it, then type "
                f"fedx-pl federate keys --sites {name} for a new one"
            )
    when: dict[str, float] = {}
    for file in revoked.values():
        name = file.stem.rpartition(".")[0]
        when[name] = max(when.get(name, 0.0), file.stat().st_mtime)
    return ServerKeys(ca=ca, certificate=certificate, key=key, sites=public, revoked=when)


def _public_files(folder: Path) -> dict[str, Path]:
    """The public keys of a coordinator's folder, by the name of their site."""
    files = sorted((folder / "sites").glob("*.pub"))
    for file in files:
        require_site_name(str(file.parent), file.stem)
    return {file.stem: file for file in files}


def _revoked(folder: Path) -> dict[bytes, Path]:
    """Revoked public keys of a coordinator's folder, and their files."""
    return {read_public(file): file for file in sorted((folder / "revoked").glob("*.pub"))}


def _short(public: bytes) -> str:
    return hashlib.sha256(public).hexdigest()[:16]


def _authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate, bool]:
    """The CA's key and certificate, and whether the certificate was renewed."""
    key_file = folder / "ca.key"
    certificate_file = folder / "ca.crt"
    # Another CA would make what is there useless.
    if any((folder / name).exists() for name in ("ca.crt", "server", "sites")):
        if not key_file.exists() or not certificate_file.exists():
            raise UserError(
                f"{key_file} and {certificate_file.name} are needed to make further keys; put them "
                "back, or choose another --out"
            )
        private = read_private(key_file)
        certificate = read_certificate(certificate_file)
        if not expires_soon(certificate):
            return private, certificate, False
        certificate = authority_certificate(private)
        write_atomically(certificate_file, certificate_pem(certificate))
        return private, certificate, True
    private = new_private()
    certificate = authority_certificate(private)
    write_private(key_file, private)
    # Last: with it, the authority is complete.
    write_atomically(certificate_file, certificate_pem(certificate))
    return private, certificate, False


def _server(
    folder: Path, host: str, authority: ec.EllipticCurvePrivateKey, ca: x509.Certificate
) -> None:
    file = folder / "server.crt"
    write_atomically(folder / "ca.crt", certificate_pem(ca))
    before = hosts_of(read_certificate(file)) if file.exists() else []
    if host in before and not expires_soon(read_certificate(file)):
        return
    private = new_private()
    certificate = server_certificate(private, [*before, host], authority, ca)
    write_private(folder / "server.key", private)
    write_atomically(file, certificate_pem(certificate))


def _site(folder: Path, name: str, server: str, ca: x509.Certificate) -> None:
    place = folder / "sites" / name
    revoked = _revoked(folder / "server")
    if not (place / "site.key").exists() or public_pem(read_private(place / "site.key")) in revoked:
        write_private(place / "site.key", new_private())
    private = read_private(place / "site.key")
    write_atomically(folder / "server" / "sites" / f"{name}.pub", public_pem(private))
    write_atomically(place / "ca.crt", certificate_pem(ca))
    write_atomically(place / "site.json", json.dumps({"name": name, "server": server}).encode())
