"""Who may have a stored checkpoint: an archive names one, and an archive is no proof of whose it is."""

from ocihook.config import ANY, Settings
from ocihook.errors import AdmissionError
from ocihook.model import ContainerRef
from ocihook.store.lineage import domain_name


def check_domain(domain: str, container: ContainerRef | None, settings: Settings) -> None:
    """Refuse a restore from a domain that is neither the container's own nor allowed to it by the administrator.

    Args:
        domain: the one that the image set names.
        container: as its engine, not the archive, describes it; None if that is not known.
        settings: with the administrator's rules.

    Raises:
        AdmissionError: to refuse it, before anything of the domain is read or pulled.
        IdentificationError: if the container is in a pod whose namespace is not known.
    """
    if container is None:
        raise AdmissionError(
            f"the checkpoint is in domain {domain} of the store, and it is not known whose container this is",
            hint="restore it through its engine, or make a complete archive of it by `ocihook archive pack`",
        )
    own = domain_name(container)
    rules = settings.restore_from
    allowed = {own, *rules.get(own, ()), *rules.get(ANY, ())}
    if not allowed & {domain, ANY}:
        raise AdmissionError(
            f"the checkpoint is in domain {domain} of the store, the container's own is {own}",
            hint=f'an administrator can allow it, in /etc/ocihook/config.toml: [restore_from] {own} = ["{domain}"]',
        )
