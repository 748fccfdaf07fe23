"""Keys and certificates: an authority of one's own, what it signs, and what a certificate says of its holder.

Keys are ECDSA on P-256. A leaf certificate is for one end only (server or client), and that of a client or an operator
names its identity as a URI, `fairfleet://client/NAME`.
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
from fairfleet.common.identity import NOBODY, Identity, identity_of

CLIENT_TTL = timedelta(days=90)
DNS_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*")
SERVER_TTL = timedelta(days=365)
CA_TTL = timedelta(days=3650)
BACKDATED = timedelta(hours=1)  # a device whose clock is a little behind must not find its certificate in the future
REQUEST_BYTES = 8192  # of a certificate request: one of ours has 300
REMEMBERED = 10_000

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey


class Pair(NamedTuple):
    """A private key and its certificate, as PEM."""

    key: bytes
    certificate: bytes


class Certified(NamedTuple):
    """What a certificate says."""

    identity: Identity
    begins: datetime
    ends: datetime


@dataclass(frozen=True)
class Authority:
    certificate: x509.Certificate
    key: PrivateKey

    @classmethod
    def of(cls, pair: Pair) -> Authority:
        certificate = load_certificate(pair.certificate, "the CA's certificate")
        key = load_key(pair.key, "the CA's key")
        if key.public_key() != certificate.public_key():
            raise UsageError("the CA's key is not that of its certificate: they are of two `fairfleet pki init`")
        return cls(certificate, key)

    def server(self, names: Sequence[str], ttl: timedelta = SERVER_TTL) -> Pair:
        """For a server that is called by any of these DNS names and IP addresses."""
        key = new_key()
        alternatives = [_general_name(name) for name in names]
        signed = self._sign(key.public_key(), names[0][:64], alternatives, ExtendedKeyUsageOID.SERVER_AUTH, ttl)
        return Pair(key_pem(key), pem(signed))

    def member(self, identity: Identity, ttl: timedelta = CLIENT_TTL, now: datetime | None = None) -> Pair:
        key = new_key()
        return Pair(key_pem(key), self.certify(identity, key.public_key(), ttl, now))

    def certify(
        self, identity: Identity, key: PublicKey, ttl: timedelta = CLIENT_TTL, now: datetime | None = None
    ) -> bytes:
        """A certificate for somebody's own key."""
        alternatives = [x509.UniformResourceIdentifier(identity.uri)]
        return pem(self._sign(key, identity.name, alternatives, ExtendedKeyUsageOID.CLIENT_AUTH, ttl, now))

    def _sign(
        self,
        key: PublicKey,
        name: str,
        alternatives: Sequence[x509.GeneralName],
        usage: ObjectIdentifier,
        ttl: timedelta,
        now: datetime | None = None,
    ) -> x509.Certificate:
        now = now or datetime.now(UTC)
        ends = min(now + ttl, self.certificate.not_valid_after_utc)
        if ends <= now:
            raise UsageError(
                f"the CA's certificate ended on {self.certificate.not_valid_after_utc:%Y-%m-%d}; "
                "make a new one with `fairfleet pki init` in a new folder and enroll everybody again"
            )
        begins = max(now - BACKDATED, self.certificate.not_valid_before_utc)
        builder = _builder(name, self.certificate.subject, key, begins, ends)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        issuer = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        identifier = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer)
        return builder.add_extension(identifier, critical=False).sign(self.key, hashes.SHA256())


def new_authority(name: str, ttl: timedelta = CA_TTL, now: datetime | None = None) -> Pair:
    key, now = new_key(), now or datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(name, subject, key.public_key(), now - BACKDATED, now + ttl)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return Pair(key_pem(key), pem(builder.sign(key, hashes.SHA256())))


def _builder(name: str, issuer: x509.Name, key: PublicKey, begins: datetime, ends: datetime) -> x509.CertificateBuilder:
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
    """What a server may be called by, as certificates write it; commas and spaces are a list, not a name."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    if len(name) > 253 or not DNS_NAME.fullmatch(name):
        raise UsageError(f"{name!r} is neither a DNS name nor an IP address; several names are several words")
    return name


def _general_name(name: str) -> x509.GeneralName:
    checked = checked_name(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(checked))
    except ValueError:
        return x509.DNSName(checked)


# ---- requests: a device makes its own key, and asks for a certificate --------------------------------


def new_request(identity: Identity) -> tuple[bytes, bytes]:
    """A new private key (PEM), and the request for its certificate (DER)."""
    key = new_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    uri = x509.UniformResourceIdentifier(identity.uri)
    builder = builder.add_extension(x509.SubjectAlternativeName([uri]), critical=False)
    request = builder.sign(key, hashes.SHA256())
    return key_pem(key), request.public_bytes(serialization.Encoding.DER)


# What cryptography raises for requests that are none: they come from strangers.
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
    """Whom the request is for, and the key, which its sender has proved to hold. Nothing else in it is looked at."""
    if len(data) > REQUEST_BYTES:
        raise BadRequest(f"a certificate request has at most {REQUEST_BYTES} bytes; found {len(data)}")
    try:
        request = x509.load_der_x509_csr(data)
        key = request.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise BadRequest("the key of a certificate request must be ECDSA on P-256")
        if not request.is_signature_valid:
            raise BadRequest("the certificate request is not signed with its own key")
        return _identity_among(request.extensions), key
    except UNREADABLE as error:
        raise BadRequest(f"this is no certificate request: {type(error).__name__}") from None


def key_digest(key: PublicKey) -> str:
    digest = hashes.Hash(hashes.SHA256())
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    digest.update(key.public_bytes(serialization.Encoding.DER, form))
    return digest.finalize().hex()


# ---- reading ---------------------------------------------------------------------------------------


@lru_cache(REMEMBERED)
def certified(certificate: bytes) -> Certified:
    """Of a PEM certificate whose signature somebody else has verified. The same is asked at every call of a peer."""
    found = x509.load_pem_x509_certificate(certificate)
    return Certified(_identity_among(found.extensions), found.not_valid_before_utc, found.not_valid_after_utc)


def _identity_among(extensions: x509.Extensions) -> Identity:
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return NOBODY
    return identity_of(list(names.get_values_for_type(x509.UniformResourceIdentifier)))


def load_certificate(data: bytes, what: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(data)
    except ValueError:
        raise UsageError(f"{what} is damaged: this is no PEM certificate") from None


def load_key(data: bytes, what: str) -> PrivateKey:
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError):
        raise UsageError(f"{what} is damaged: this is no PEM key without a password") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{what} must be ECDSA; found {type(key).__name__}")
    return key


def belong_together(pair: Pair) -> bool:
    """Whether the key is the certificate's: of two files, one may have been replaced just now."""
    try:
        key = serialization.load_pem_private_key(pair.key, None)
        certificate = x509.load_pem_x509_certificate(pair.certificate)
    except (ValueError, TypeError):
        return False
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return key.public_key().public_bytes(*form) == certificate.public_key().public_bytes(*form)


def fingerprint(certificate: bytes) -> str:
    """Of a PEM certificate: SHA-256, as people compare it."""
    return x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex(":")


def new_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: PrivateKey) -> bytes:
    form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, secret)


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
