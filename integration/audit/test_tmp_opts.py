import pytest
from integration.audit.test_states import IMAGE, wait_for, tarfile
OPTS = {
 "tty": ["-t"], "privileged": ["--privileged"], "readonly": ["--read-only"], "vol": ["--volume", "/var/tmp:/v:ro,rshared"],
 "shm": ["--shm-size", "1m", "--tmpfs", "/x:size=1m,mode=700"], "init": ["--init"], "mounts": ["--mount", "type=tmpfs,destination=/y,tmpfs-mode=1777", "--volume", "named:/n"],
 "user": ["--user", "1000:1000"], "cgroupns": ["--cgroupns", "host"], "systemd": ["--systemd", "always"], "hostpid": ["--ipc", "host"],
}
def one(podman, name):
    podman("run", "--detach", "--name", name, "--network", "none", "--pids-limit", "0", *OPTS[name], IMAGE, "/workload", check=True)
    wait_for(name, lambda: podman.count(name)[0] > 2)
    archive = podman.scratch / f"{name}.tar"
    before = podman.count(name)[0]
    said = podman.checkpoint(name, archive, check=False)
    if not archive.exists() or not tarfile.is_tarfile(archive):
        print("REFUSED", name, said[-500:]); podman.remove(name); return
    podman.remove(name)
    print("RESTORE", name, podman.restore(archive, check=False)[-300:])
    podman.remove(name)
def run(podman, tag):
    for name in OPTS:
        try: one(podman, name)
        except BaseException as e: print("FAILED", name, str(e)[-600:])
    for line in podman.agent_log().splitlines():
        if "not restored" in line or "preflight" in line or "record" in line or "compared" in line: print(tag, line[:400])
@pytest.mark.parametrize("podman", ["runc", "crun"], indirect=True)
def test_old(podman, request): run(podman, "OLD" + request.node.name)
def test_new(new_podman): run(new_podman, "NEW")
