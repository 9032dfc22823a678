"""Signatures of the coordinator's messages, so that a site obeys only its coordinator.

TLS may end at a proxy, and Flower does not tell a site who wrote a message. So the coordinator
signs each message and sends its certificate along. A site needs only the CA that it has.
"""

import hashlib
import itertools
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedx_pl.sites.certificates import AUTHORITY, public_pem, read_private
from fedx_pl.sites.keys import ServerKeys
from fedx_pl.sites.wire import BadMessage

_SCHEME = ec.ECDSA(hashes.SHA384())


class Seal:
    """Signs the coordinator's messages."""

    def __init__(self, keys: ServerKeys) -> None:
        """Reads the coordinator's key.

        Args:
            keys: the coordinator's keys.
        """
        self._private = read_private(keys.key)
        self._certificate = keys.certificate.read_bytes()
        self._session = secrets.token_hex(16)
        self._numbers = itertools.count(1)

    def fields(self, site: bytes, kind: str, text: str, blob: bytes) -> dict[str, Any]:
        """The fields that prove to a site who sent a message.

        Args:
            site: the registered public key of the site (PEM).
            kind: the kind of the message.
            text: the JSON of the message, which names the run.
            blob: the tensors of the message.
        """
        number = next(self._numbers)
        signature = self._private.sign(
            _signed(site, kind, self._session, number, text=text, blob=blob), _SCHEME
        )
        return {
            "session": self._session,
            "number": number,
            "certificate": self._certificate,
            "signature": signature,
        }


class Trust:
    """Checks at a site which messages are its coordinator's.

    Keep one for as long as the site runs: it remembers which messages have come.
    """

    def __init__(self, ca: Path, private: ec.EllipticCurvePrivateKey) -> None:
        """Reads the CA.

        Args:
            ca: file of certificates; only the federation's own CA counts, not that of a proxy.
            private: the site's key.
        """
        found = x509.load_pem_x509_certificates(ca.read_bytes())
        names = [(one, one.subject.get_attributes_for_oid(NameOID.COMMON_NAME)) for one in found]
        self._authorities = [one for one, name in names if name and name[0].value == AUTHORITY]
        self._site = public_pem(private)
        self._last: dict[str, int] = {}  # by session: a coordinator's process

    def check(self, kind: str, fields: Mapping[str, Any], text: str, blob: bytes) -> None:
        """Checks that a new message is from the coordinator and for this site.

        Args:
            kind: the kind of the message.
            fields: what `Seal.fields` made, or anything.
            text: the JSON of the message.
            blob: the tensors of the message.

        Raises:
            BadMessage: it is from someone else, for another site, or has come before.
        """
        try:
            session = str(fields["session"])
            number = int(fields["number"])
            certificate = x509.load_pem_x509_certificate(fields["certificate"])
            public = self._coordinator(certificate)
            public.verify(
                fields["signature"],
                _signed(self._site, kind, session, number, text=text, blob=blob),
                _SCHEME,
            )
        except KeyError as error:
            raise BadMessage(
                "it is not signed by the coordinator; it may need a newer fedx-pl"
            ) from error
        except (ValueError, TypeError, InvalidSignature) as error:
            raise BadMessage(
                "it is not signed by this federation's coordinator for this site"
            ) from error
        if number <= self._last.get(session, 0):
            raise BadMessage("it has come before")
        self._last[session] = number

    def _coordinator(self, certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
        public = certificate.public_key()
        now = datetime.now(UTC)
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise TypeError("another kind of key")
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise ValueError("a certificate that is not valid now")
        for authority in self._authorities:
            try:
                certificate.verify_directly_issued_by(authority)
            except (ValueError, TypeError, InvalidSignature):
                continue
            return public
        raise ValueError("a certificate of another CA")


def _signed(site: bytes, kind: str, session: str, number: int, *, text: str, blob: bytes) -> bytes:
    parts = [
        b"fedx-pl message 1",
        site,
        kind.encode(),
        session.encode(),
        str(number).encode(),
        text.encode(),
        blob,
    ]
    return b"".join(hashlib.sha384(part).digest() for part in parts)
