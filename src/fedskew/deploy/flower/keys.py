"""A certificate authority, a server's certificate, and keys of sites, as PEM text. One frame in, one out."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from typing import Any

from .frames import Header, Pipe


def make(config: Header) -> Header:
    """What `config` asks for: {"hosts": [...], "sites": [...], "days": n, "ca": {...} or None}."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    made: Header = {"sites": {}}
    for site in config["sites"]:
        private = _private()
        made["sites"][site] = {"key": _secret(private), "public": _public(private)}
    if not config["hosts"]:
        return made
    span = (
        datetime.now(UTC) - timedelta(hours=1),
        datetime.now(UTC) + timedelta(days=config["days"]),
    )
    if config["ca"]:
        authority = serialization.load_pem_private_key(config["ca"]["key"].encode(), None)
        root = x509.load_pem_x509_certificate(config["ca"]["certificate"].encode())
    else:
        authority = _private()
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedskew trial CA")])
        root = (
            _blank(name, name, authority, span)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
            .sign(authority, hashes.SHA384())
        )
    private = _private()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, config["hosts"][0][:64])])
    certificate = (
        _blank(subject, root.subject, private, span)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in config["hosts"]]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    pem = serialization.Encoding.PEM
    made["ca"] = {"key": _secret(authority), "certificate": root.public_bytes(pem).decode()}
    made["server"] = {"key": _secret(private), "certificate": certificate.public_bytes(pem).decode()}
    return made


def _private() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _secret(private: Any) -> str:
    from flwr.supercore.primitives.asymmetric import private_key_to_bytes

    return str(private_key_to_bytes(private).decode())


def _public(private: Any) -> str:
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    return str(public_key_to_bytes(private.public_key()).decode())


def _alternative(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(**allowed: bool) -> Any:
    from cryptography import x509

    names = "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign"
    every = [*names.split(), "crl_sign", "encipher_only", "decipher_only"]
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in every})


def _blank(subject: Any, issuer: Any, private: Any, span: tuple[datetime, datetime]) -> Any:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(span[0])
        .not_valid_after(span[1])
    )


def main() -> None:
    pipe = Pipe()
    first = pipe.hear()
    if first is not None:
        pipe.tell(make(first[0]))
