"""Creates keys and certificates as PEM text: for a certificate authority, a server and sites. One frame in, one out."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from typing import Any

from .frames import Header, Pipe


def make(config: Header) -> Header:
    """Keys and certificates for {"hosts": [...], "sites": [names], "days": n}.

    Returns {"sites": {name: {"key", "public"}}}; if there are hosts, also a new authority and the server's certificate:
    {"ca": {"key", "certificate"}, "server": {"key", "certificate"}}, valid for `days` and for these hosts.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    made: Header = {"sites": {}}
    for site in config["sites"]:
        private = _new_key()
        made["sites"][site] = {"key": _private_pem(private), "public": _public_pem(private)}
    if not config["hosts"]:
        return made
    now = datetime.now(UTC)
    valid = (now - timedelta(hours=1), now + timedelta(days=config["days"]))  # an hour ago: clocks differ
    authority = _new_key()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedskew trial CA")])
    root = (
        _builder(name, name, authority, valid)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    private = _new_key()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, config["hosts"][0][:64])])
    certificate = (
        _builder(subject, root.subject, private, valid)
        .add_extension(x509.SubjectAlternativeName([_host_name(host) for host in config["hosts"]]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    pem = serialization.Encoding.PEM
    made["ca"] = {"key": _private_pem(authority), "certificate": root.public_bytes(pem).decode()}
    made["server"] = {"key": _private_pem(private), "certificate": certificate.public_bytes(pem).decode()}
    return made


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _private_pem(private: Any) -> str:
    from flwr.supercore.primitives.asymmetric import private_key_to_bytes

    return str(private_key_to_bytes(private).decode())


def _public_pem(private: Any) -> str:
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    return str(public_key_to_bytes(private.public_key()).decode())


def _host_name(host: str) -> Any:
    """A host name or IP address as a certificate's subjectAltName."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(**allowed: bool) -> Any:
    """The KeyUsage extension with the given uses; the others are False."""
    from cryptography import x509

    names = "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign"
    every = [*names.split(), "crl_sign", "encipher_only", "decipher_only"]
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in every})


def _builder(subject: Any, issuer: Any, private: Any, valid: tuple[datetime, datetime]) -> Any:
    """A certificate without extensions, not signed yet."""
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(valid[0])
        .not_valid_after(valid[1])
    )


def main() -> None:
    """Receive one config, send the keys and certificates for it."""
    pipe = Pipe()
    first = pipe.receive()
    if first is not None:
        pipe.send(make(first[0]))
