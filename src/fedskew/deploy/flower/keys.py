"""Creates keys and certificates as PEM text: for a certificate authority, a server and sites. One frame in, one out."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from typing import Any

from .frames import Header, Pipe

AUTHORITY_DAYS = 3650  # an authority's certificate is at every site, so it should seldom change


def make(config: Header) -> Header:
    """Keys and certificates for {"hosts": [...], "sites": [names], "days": n}.

    Returns {"sites": {name: {"key", "public"}}}; if there are hosts, also a new authority and the server's certificate:
    {"ca": {"key", "certificate"}, "server": {"key", "certificate"}}. The server's is valid for `days` and these hosts.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    made: Header = {"sites": {}}
    for site in config["sites"]:
        private = _new_key()
        made["sites"][site] = {"key": _private_pem(private), "public": _public_pem(private)}
    if not config["hosts"]:
        return made
    authority = _new_key()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedskew trial CA")])
    root = (
        _builder(name, name, authority, max(config["days"], AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    made["ca"] = {"key": _private_pem(authority), "certificate": _certificate_pem(root)}
    made["server"] = _server_certificate(authority, root.subject, config["hosts"], config["days"])
    return made


def renew(config: Header) -> Header:
    """A new key and certificate of the server: {"server": {"key", "certificate"}}.

    `config` is {"ca_key", "ca_certificate", "hosts", "days"}; the first two are PEM text. ValueError, with a sentence,
    if they do not belong together.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    authority: Any = load_pem_private_key(config["ca_key"].encode(), None)
    root = x509.load_pem_x509_certificate(config["ca_certificate"].encode())
    if root.public_key() != authority.public_key():
        raise ValueError("ca.key is not the key of ca.crt")
    return {"server": _server_certificate(authority, root.subject, config["hosts"], config["days"])}


def inspect(pem: bytes) -> Header:
    """Until when a certificate is valid, and for which hosts: {"until": ISO time, "hosts": [...]}."""
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(pem)
    try:
        names: Any = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = [str(name.value) for name in names]
    except x509.ExtensionNotFound:
        hosts = []
    return {"until": certificate.not_valid_after_utc.isoformat(), "hosts": hosts}


def _server_certificate(authority: Any, issuer: Any, hosts: list[str], days: int) -> Header:
    """A new key of the server, and its certificate for these hosts, signed by the authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    private = _new_key()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, hosts[0][:64])])
    certificate = (
        _builder(subject, issuer, private, days)
        .add_extension(x509.SubjectAlternativeName([_host_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    return {"key": _private_pem(private), "certificate": _certificate_pem(certificate)}


def _certificate_pem(certificate: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return str(certificate.public_bytes(Encoding.PEM).decode())


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


def _builder(subject: Any, issuer: Any, private: Any, days: int) -> Any:
    """A certificate without extensions, valid from an hour ago (clocks differ) for `days`; not signed yet."""
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
    )


def main() -> None:
    """Receive one config, send what it asks for: {"do": "make" | "renew" | "inspect", ...}, or {"failed": why}."""
    pipe = Pipe()
    first = pipe.receive()
    if first is None:
        return
    config = first[0]
    try:
        if config.get("do") == "inspect":
            pipe.send(inspect(config["certificate"].encode()))
        else:
            pipe.send(renew(config) if config.get("do") == "renew" else make(config))
    except (ValueError, TypeError) as error:
        pipe.send({"failed": str(error)})
