"""Create and read keys and certificates: our own authority, what it signs, and identities.

Keys are ECDSA on P-256. A leaf certificate is valid for one end only (server or client). The
certificate of a client or an operator contains its identity as a URI, `fairfleet://client/NAME`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from fairfleet.common.errors import BadRequest, UsageError
from fairfleet.common.pki.identity import NOBODY, Identity, identity_of

CLIENT_TTL = timedelta(days=90)
DNS_NAME = re.compile(
    r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*"
)
SERVER_TTL = timedelta(days=365)
CA_TTL = timedelta(days=3650)
# Certificates begin earlier, so that they are valid on a device whose clock is a little slow.
BACKDATED = timedelta(hours=1)
REQUEST_BYTES = 8192  # largest size of a certificate request; one of ours has 300
REMEMBERED = 10_000  # certificates in the cache of `certified`

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey


class KeyPair(NamedTuple):
    """A private key and its certificate, both as PEM."""

    key: bytes
    certificate: bytes


class CertificateInfo(NamedTuple):
    """The identity and the period of validity of a certificate."""

    identity: Identity
    begins: datetime
    ends: datetime


@dataclass(frozen=True)
class Authority:
    """A certificate authority (CA): its certificate and its private key."""

    certificate: x509.Certificate
    key: PrivateKey

    @classmethod
    def of(cls, pair: KeyPair) -> Authority:
        """Return the authority of a key pair. Raises UsageError if it is not usable."""
        certificate = load_certificate(pair.certificate, "the CA's certificate")
        key = load_key(pair.key, "the CA's key")
        if key.public_key() != certificate.public_key():
            raise UsageError(
                "the CA's key is not that of its certificate: "
                "they come from two runs of `fairfleet pki init`"
            )
        return cls(certificate, key)

    def server(self, names: Sequence[str], ttl: timedelta = SERVER_TTL) -> KeyPair:
        """Return a new key and certificate for a server with these DNS names and IP addresses."""
        key = new_key()
        alternatives = [_general_name(name) for name in names]
        signed = self._sign(
            key.public_key(), names[0][:64], alternatives, ExtendedKeyUsageOID.SERVER_AUTH, ttl
        )
        return KeyPair(key_pem(key), pem(signed))

    def member(
        self, identity: Identity, ttl: timedelta = CLIENT_TTL, now: datetime | None = None
    ) -> KeyPair:
        """Return a new key and certificate for a client or an operator."""
        key = new_key()
        return KeyPair(key_pem(key), self.certify(identity, key.public_key(), ttl, now))

    def certify(
        self,
        identity: Identity,
        key: PublicKey,
        ttl: timedelta = CLIENT_TTL,
        now: datetime | None = None,
    ) -> bytes:
        """Return a PEM certificate of an identity for an existing public key."""
        alternatives = [x509.UniformResourceIdentifier(identity.uri)]
        return pem(
            self._sign(key, identity.name, alternatives, ExtendedKeyUsageOID.CLIENT_AUTH, ttl, now)
        )

    def _sign(
        self,
        key: PublicKey,
        name: str,
        alternatives: Sequence[x509.GeneralName],
        usage: ObjectIdentifier,
        ttl: timedelta,
        now: datetime | None = None,
    ) -> x509.Certificate:
        begins, ends = self._validity(ttl, now or datetime.now(UTC))
        issuer = self.certificate.extensions.get_extension_for_class(
            x509.SubjectKeyIdentifier
        ).value
        extensions: tuple[tuple[x509.ExtensionType, bool], ...] = (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.SubjectAlternativeName(alternatives), False),
            (x509.ExtendedKeyUsage([usage]), False),
            (_usage(signs_certificates=False), True),
            (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), False),
        )
        builder = _builder(name, self.certificate.subject, key, begins, ends)
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(self.key, hashes.SHA256())

    def _validity(self, ttl: timedelta, now: datetime) -> tuple[datetime, datetime]:
        """Return the begin and the end of a new certificate, within those of the CA."""
        ends = min(now + ttl, self.certificate.not_valid_after_utc)
        if ends <= now:
            raise UsageError(
                f"the CA's certificate expired on {self.certificate.not_valid_after_utc:%Y-%m-%d}; "
                "make a new one with `fairfleet pki init` in a new folder and enroll all clients "
                "and operators again"
            )
        return max(now - BACKDATED, self.certificate.not_valid_before_utc), ends


def new_authority(name: str, ttl: timedelta = CA_TTL, now: datetime | None = None) -> KeyPair:
    """Return the key and the self-signed certificate of a new authority."""
    key, now = new_key(), now or datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(name, subject, key.public_key(), now - BACKDATED, now + ttl)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    return KeyPair(key_pem(key), pem(builder.sign(key, hashes.SHA256())))


def _builder(
    name: str, issuer: x509.Name, key: PublicKey, begins: datetime, ends: datetime
) -> x509.CertificateBuilder:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(begins).not_valid_after(ends)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def checked_name(name: str) -> str:
    """Return a server's DNS name or IP address in the form that certificates use.

    Raises UsageError if it is neither, for example a list with commas or spaces.
    """
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    if len(name) > 253 or not DNS_NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is neither a DNS name nor an IP address; "
            "give several names as separate arguments"
        )
    return name


def _general_name(name: str) -> x509.GeneralName:
    checked = checked_name(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(checked))
    except ValueError:
        return x509.DNSName(checked)


# ---- requests: a device makes its own key, and requests a certificate for it -----------------


def new_request(identity: Identity) -> tuple[bytes, bytes]:
    """Return a new private key (PEM), and the request for its certificate (DER)."""
    key = new_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    uri = x509.UniformResourceIdentifier(identity.uri)
    builder = builder.add_extension(x509.SubjectAlternativeName([uri]), critical=False)
    request = builder.sign(key, hashes.SHA256())
    return key_pem(key), request.public_bytes(serialization.Encoding.DER)


# What cryptography raises for malformed requests, which any unauthenticated peer can send.
UNREADABLE = (
    ValueError,
    TypeError,
    InvalidSignature,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
    x509.AttributeNotFound,
)


def read_request(data: bytes) -> tuple[Identity, PublicKey]:
    """Return the identity and the public key of a certificate request.

    The signature proves that the sender has the private key. Nothing else in the request is
    used. Raises BadRequest if it is not usable.
    """
    if len(data) > REQUEST_BYTES:
        raise BadRequest(
            f"a certificate request has at most {REQUEST_BYTES} bytes; found {len(data)}"
        )
    try:
        request = x509.load_der_x509_csr(data)
        key = request.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(
            key.curve, ec.SECP256R1
        ):
            raise BadRequest("the key of a certificate request must be ECDSA on P-256")
        if not request.is_signature_valid:
            raise BadRequest("the certificate request is not signed with its own key")
        return _identity_among(request.extensions), key
    except UNREADABLE as error:
        raise BadRequest(f"this is not a certificate request: {type(error).__name__}") from None


def key_digest(key: PublicKey) -> str:
    """Return the SHA-256 digest of a public key, in hexadecimal digits."""
    digest = hashes.Hash(hashes.SHA256())
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    digest.update(key.public_bytes(serialization.Encoding.DER, form))
    return digest.finalize().hex()


# ---- reading -----------------------------------------------------------------------------------


@lru_cache(REMEMBERED)
def certified(certificate: bytes) -> CertificateInfo:
    """Return the identity and validity of a PEM certificate. The caller has verified its signature.

    Results are cached, because every call of a peer needs them.
    """
    parsed = x509.load_pem_x509_certificate(certificate)
    return CertificateInfo(
        _identity_among(parsed.extensions), parsed.not_valid_before_utc, parsed.not_valid_after_utc
    )


def _identity_among(extensions: x509.Extensions) -> Identity:
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return NOBODY
    return identity_of(list(names.get_values_for_type(x509.UniformResourceIdentifier)))


def load_certificate(data: bytes, what: str) -> x509.Certificate:
    """Return a PEM certificate. Raises UsageError, which calls it `what`, if it is damaged."""
    try:
        return x509.load_pem_x509_certificate(data)
    except ValueError:
        raise UsageError(f"{what} is damaged: it is not a PEM certificate") from None


def load_key(data: bytes, what: str) -> PrivateKey:
    """Return a PEM key. Raises UsageError, which calls it `what`, if it is not usable."""
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError):
        raise UsageError(f"{what} is damaged: it is not a PEM key without a password") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{what} must be ECDSA; found {type(key).__name__}")
    return key


def belong_together(pair: KeyPair) -> bool:
    """Return whether the key is that of the certificate.

    They may differ for a moment while the two files are replaced one after the other.
    """
    try:
        key = serialization.load_pem_private_key(pair.key, None)
        certificate = x509.load_pem_x509_certificate(pair.certificate)
    except (ValueError, TypeError):
        return False
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return key.public_key().public_bytes(*form) == certificate.public_key().public_bytes(*form)


def fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 fingerprint of a PEM certificate, with colons."""
    return x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex(":")


def new_key() -> PrivateKey:
    """Return a new private key, ECDSA on P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: PrivateKey) -> bytes:
    """Return a private key as PEM, without a password."""
    form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, secret)


def pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)
