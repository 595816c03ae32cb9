"""An authority that gives nodes certificates."""

import datetime as dt
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Make one.

        Args:
            host: address of those who get certificates.
        """
        self._host = host
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign("authority", self.key, None, host)

    def _sign(
        self, name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Certificate | None, host: str
    ) -> x509.Certificate:
        named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = dt.datetime.now(dt.UTC)
        hosts = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address(host))])
        builder = (
            x509.CertificateBuilder()
            .subject_name(named)
            .issuer_name(issuer.subject if issuer else named)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
            .add_extension(hosts, critical=False)
        )
        if issuer is None:
            usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
            builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        else:
            ours = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
            builder = builder.add_extension(ours, critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def give(self, directory: Path, name: str, host: str = "") -> Path:
        """Write a certificate for a node into a directory; its address is that of all, or `host`."""
        directory.mkdir()
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (directory / "tls.key").write_bytes(private)
        pem = serialization.Encoding.PEM
        (directory / "tls.crt").write_bytes(
            self._sign(name, key, self.certificate, host or self._host).public_bytes(pem)
        )
        (directory / "ca.crt").write_bytes(self.certificate.public_bytes(pem))
        return directory
