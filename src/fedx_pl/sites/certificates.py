"""Makes and reads the keys and certificates of a federation.

All keys are elliptic-curve keys on the curve P-384, in PEM files. Files may be anybody's: whatever
is wrong with one is a `UserError` of one line that names it.
"""

import ipaddress
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedx_pl.errors import UserError, first_line, short
from fedx_pl.files.reading import read_bytes

YEARS = 5
RENEW_DAYS = 30  # A certificate that ends sooner is renewed when keys are made.
AUTHORITY = "fedx-pl federation"  # the CA's name
MAX_FILE = 1_000_000  # bytes of a key or of certificates


# --- private and public keys ----------------------------------------------------------------------


def new_private() -> ec.EllipticCurvePrivateKey:
    """A new private key."""
    return ec.generate_private_key(ec.SECP384R1())


def public_pem(private: ec.EllipticCurvePrivateKey) -> bytes:
    """The public half of a private key, as PEM."""
    return public_bytes(private.public_key())


def public_bytes(public: Any) -> bytes:
    """A public key as PEM."""
    plain = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(public.public_bytes(serialization.Encoding.PEM, plain))


def write_private(file: Path, private: ec.EllipticCurvePrivateKey) -> None:
    """Writes a private key, which only its owner can read from the first byte on."""
    content = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # An older file may be readable by others.
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as secret:
        secret.write(content)


def read_private(file: Path) -> ec.EllipticCurvePrivateKey:
    """Reads a private key, and refuses one that others can read."""
    try:
        private = serialization.load_pem_private_key(read_bytes(file, MAX_FILE), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(
            f"{file} is not a readable key ({first_line(error)}); `fedx-pl federate keys` makes one"
        ) from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or not _is_ours(private):
        raise UserError(
            f"{file} is not an elliptic-curve key (P-384); `fedx-pl federate keys` makes one"
        )
    if os.name == "posix" and file.stat().st_mode & 0o077:
        raise UserError(f"{file} can be read by others than its owner; type chmod 600 {file}")
    return private


def read_public(file: Path) -> bytes:
    """Reads a public key and returns it as PEM."""
    try:
        public = serialization.load_pem_public_key(read_bytes(file, MAX_FILE))
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{file} is not a public key; remove it or put it right") from error
    if not isinstance(public, ec.EllipticCurvePublicKey) or not _is_ours(public):
        raise UserError(
            f"{file} is not an elliptic-curve key (P-384); remove it, `fedx-pl federate keys` "
            "makes one"
        )
    return public_bytes(public)


def _is_ours(key: ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey) -> bool:
    return isinstance(key.curve, ec.SECP384R1)


# --- certificates ---------------------------------------------------------------------------------


def authority_certificate(private: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """The CA's certificate, signed by its own key."""
    name = _name(AUTHORITY)
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _builder(name, name, private).add_extension(constraints, True)
    return builder.add_extension(usage, True).sign(private, hashes.SHA384())


def server_certificate(
    private: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    authority: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
) -> x509.Certificate:
    """A coordinator's certificate.

    Args:
        private: the coordinator's key.
        hosts: names and addresses by which sites reach the coordinator, its usual one last.
        authority: the CA's key.
        ca: the CA's certificate.
    """
    known = dict.fromkeys([*hosts, "localhost", "127.0.0.1"])
    names = x509.SubjectAlternativeName([general_name(host) for host in known])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    builder = _builder(_name(hosts[-1]), ca.subject, private).add_extension(names, False)
    return builder.add_extension(issuer, False).sign(authority, hashes.SHA384())


def _builder(
    subject: x509.Name, issuer: x509.Name, private: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    public = private.public_key()
    builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(hours=1))
    builder = builder.not_valid_after(now + timedelta(days=365 * YEARS))
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def general_name(host: str) -> x509.GeneralName:
    """A host name or address as it stands in a certificate."""
    with suppress(ValueError):
        if "%" not in host:  # Behind it stands a network interface, which is another at each site.
            return x509.IPAddress(ipaddress.ip_address(host))
    label = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
    if (
        len(host) > 253
        or not re.fullmatch(rf"{label}(\.{label})*\.?", host)
        or re.fullmatch(r"[0-9.]+", host)
    ):
        raise UserError(
            f"--host {short(host)} is not a host name or address; type the one by which sites "
            "reach this machine, e.g. --host coordinator.example.org"
        )
    return x509.DNSName(host)


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """The names and addresses in a coordinator's certificate."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """A certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def read_certificate(file: Path) -> x509.Certificate:
    """Reads the first certificate in a file; a site's ca.crt may have that of a proxy after it."""
    try:
        return x509.load_pem_x509_certificate(read_bytes(file, MAX_FILE))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{file} is not a certificate ({first_line(error)}); "
            f"put it back from where keys were made"
        ) from error


def require_valid(file: Path, instead: str) -> None:
    """Raises a `UserError` if a certificate is not valid today.

    Args:
        file: the certificate.
        instead: what to do about it.
    """
    certificate = read_certificate(file)
    now = datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        raise UserError(
            f"{file} has expired on {certificate.not_valid_after_utc:%Y-%m-%d}; {instead}"
        )
    if now < certificate.not_valid_before_utc:
        raise UserError(
            f"{file} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on; see "
            f"that this machine's clock is right ({now:%Y-%m-%d %H:%M} UTC)"
        )


def expires_soon(certificate: x509.Certificate) -> bool:
    """Whether a certificate should be renewed."""
    return certificate.not_valid_after_utc < datetime.now(UTC) + timedelta(days=RENEW_DAYS)
