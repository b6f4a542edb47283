"""Ways to get workers: processes here, a scheduler that is there, Slurm, Kubernetes.

Each starts or finds them, has them end with a stack, and says what to connect to.
"""

import contextlib
import datetime
import json
import logging
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mdpext_dask.compute.dask_settings import DASK_CONFIG, nested
from mdpext_dask.compute.kubernetes import cluster_manifest
from mdpext_dask.errors import ClusterError, SpecError, first_line
from mdpext_dask.files import scratch_in
from mdpext_dask.job.sections import ClusterSection

CONNECT_SECONDS = 10
# Where there is a scheduler file, workers may just be starting, perhaps from a slow disk.
_FIRST_WORKER_SECONDS = 120
_ANSWER_SECONDS, _HOUR = 60, 3600
# Before and after now, as long as a run may take.
_VALID = datetime.timedelta(days=365)
# Pages that a scheduler and workers would serve to whoever asks.
_NO_PAGES: dict[str, Any] = {"distributed.scheduler.http.routes": [], "distributed.worker.http.routes": []}
# What to connect to; what is wrong if that fails; seconds that the first worker may take to come.
Start = tuple[Any, str, float]


def _reach(stack: contextlib.ExitStack, cluster: ClusterSection, workers: int) -> Start:  # noqa: ARG001
    """Return the address of a running scheduler."""
    address, seconds = str(cluster.address), CONNECT_SECONDS
    if address.endswith(".json"):
        seconds, file = _FIRST_WORKER_SECONDS, address
        try:
            content = json.loads(Path(file).read_text())
        except (OSError, ValueError) as error:
            raise ClusterError(f"cluster.address: {file} is no scheduler file: {first_line(error)}") from None
        if not isinstance(content, dict) or not isinstance(content.get("address"), str):
            raise ClusterError(f"cluster.address: {file} is no scheduler file: it has no address")
        address = content["address"].strip()
    failed = f"no scheduler with workers answers at {address}"
    try:
        _listen(address)
    except (OSError, ValueError) as error:
        raise ClusterError(f"cluster: {failed}: {first_line(error)}") from None
    return address, failed, seconds


def _listen(address: str) -> None:
    """Check that the server at an address sends the first bytes, as a scheduler does.

    Dask's own client waits without a time limit for a server that only accepts connections, as a frozen
    scheduler does (seen with distributed 2026.8). With TLS the client sends first, so nothing is checked.

    Raises
    ------
    OSError, ValueError
        If no server is there, or it sends nothing.
    """
    parts = urlsplit(address if "://" in address else f"tcp://{address}")
    if parts.scheme != "tcp":
        return
    with socket.create_connection((parts.hostname, parts.port), timeout=CONNECT_SECONDS) as connection:
        if not connection.recv(1):
            raise ConnectionError("the connection was closed")


def _start_local(stack: contextlib.ExitStack, cluster: ClusterSection, workers: int) -> Start:
    """Start worker processes here; they end with the stack.

    Scheduler and workers run whatever they are sent, and others on this machine reach its loopback: so every
    connection shows the certificate of this run, and the pages of Dask, which ask nobody who they are, are
    not served.

    An interrupt from the keyboard reaches every process of the terminal; only this one must act on it. The
    signal is blocked while the cluster's thread is made, and all that this starts inherit the block.
    """
    import dask
    from distributed import LocalCluster

    # What was read from standard input cannot be read again by the processes that start.
    main = sys.modules["__main__"]
    if (file := getattr(main, "__file__", None)) and not Path(file).exists():
        del main.__file__
        stack.callback(setattr, main, "__file__", file)
    # Otherwise the first process starts this tracker, which unblocks the signal again.
    sys.warnoptions.append("ignore:resource_tracker")  # handed down to it: it would warn of killed processes
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.pop()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # Dask never deletes its own folder there, nor what a killed run leaves in it.
        parent = Path(dask.config.get("temporary-directory", None) or tempfile.gettempdir())
        scratch = stack.enter_context(scratch_in(parent.absolute(), "mdpext-workers-"))
        stack.enter_context(dask.config.set({"temporary-directory": str(scratch), **_NO_PAGES}))
        local = stack.enter_context(
            LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                security=_own_certificate(),
                # The port is opened in any case.
                dashboard_address="127.0.0.1:0",
                scheduler_kwargs={"dashboard": False},
                # Without a limit, Dask divides memory among workers; "auto" would be among processors.
                **({} if cluster.memory_gib is None else {"memory_limit": f"{cluster.memory_gib}GiB"}),
                silence_logs=logging.CRITICAL,
            )
        )
    except (OSError, RuntimeError, TimeoutError) as error:
        raise ClusterError(
            f"cluster: the local workers could not be started: {first_line(error)}{_unguarded()}"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return local, "no local worker came", CONNECT_SECONDS


def _own_certificate() -> Any:
    """Return keys and a certificate that only this process and its children have, kept in memory.

    As those of Dask's ``Security.temporary()``, but of an elliptic curve: made in a millisecond, not in a
    tenth of a second, and with quicker connections.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from distributed import Security

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "mdpext-dask")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # The clock may be put back during a run.
        .not_valid_before(now - _VALID)
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    public = certificate.public_bytes(serialization.Encoding.PEM).decode()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    of_roles = {f"tls_{role}_cert": public for role in ("client", "scheduler", "worker")}
    of_roles |= {f"tls_{role}_key": private for role in ("client", "scheduler", "worker")}
    return Security(require_encryption=True, tls_ca_file=public, **of_roles)


def _unguarded() -> str:
    """Return a hint for scripts without a guard: worker processes start by importing the script."""
    main = sys.modules.get("__main__")
    # Modules and the command line have a specification, or are guarded.
    if getattr(main, "__spec__", None) is not None or not getattr(main, "__file__", None):
        return ""
    return (
        '; a script needs if __name__ == "__main__": around what it calls, since every process begins by '
        "importing it"
    )


def _start_slurm(stack: contextlib.ExitStack, cluster: ClusterSection, workers: int) -> Start:
    """Ask Slurm for workers, each a job; defaults are those of ``jobqueue.slurm``.

    They may wait in the queue for as long as they may run.
    """
    try:
        from dask_jobqueue import SLURMCluster
    except ImportError:
        raise SpecError('cluster: kind = "slurm" needs pip install "mdpext-dask[cluster]"') from None
    import dask

    # Slurm jobs do not inherit the settings of this process; those of this package are handed on.
    settings = dask.config.serialize(nested({key: dask.config.get(key) for key in DASK_CONFIG}))
    prologue = dask.config.get("jobqueue.slurm.job-script-prologue", None) or []
    given = {
        "job_script_prologue": [f"export DASK_INTERNAL_INHERIT_CONFIG={settings}", *prologue],
        "queue": cluster.queue,
        "account": cluster.account,
        "walltime": slurm_time(cluster.walltime_hours),
        "job_extra_directives": list(cluster.options) or None,
        "memory": None if cluster.memory_gib is None else f"{cluster.memory_gib}GiB",
    }
    if not (given["memory"] or dask.config.get("jobqueue.slurm.memory", None)):
        raise SpecError("cluster.memory_gib: how much memory does a worker need? See mdpext plan")
    try:
        slurm = stack.enter_context(
            SLURMCluster(
                cores=1,
                processes=1,
                python=sys.executable,
                scheduler_options={
                    "dashboard_address": "127.0.0.1:0",
                    **(dask.config.get("jobqueue.slurm.scheduler-options", None) or {}),
                },
                **{name: value for name, value in given.items() if value is not None},
            )
        )
        # Test first: errors at submission only go to a log, and the client waits on.
        asked = subprocess.run(
            ["sbatch", "--test-only"],  # noqa: S607 wherever Slurm is
            input=slurm.job_script(),
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
            check=False,
        )
        if asked.returncode:
            raise RuntimeError(asked.stderr.strip().rpartition("\n")[2])
        slurm.scale(workers)
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"cluster: Slurm: {first_line(error)}") from None
    return slurm, "no worker has come from Slurm", cluster.walltime_hours * _HOUR


def slurm_time(hours: float) -> str:
    """Return a time limit as Slurm reads it: whole minutes, rounded up, as hours:minutes:seconds."""
    minutes = max(-(-round(hours * 60 * 1e6) // 10**6), 1)
    return f"{minutes // 60}:{minutes % 60:02d}:00"


def _start_kubernetes(stack: contextlib.ExitStack, cluster: ClusterSection, workers: int) -> Start:
    """Ask the Dask operator of a Kubernetes cluster for a scheduler and workers."""
    try:
        import kr8s
        from dask_kubernetes.operator import KubeCluster
    except ImportError:
        raise SpecError('cluster: kind = "kubernetes" needs pip install "mdpext-dask[cluster]"') from None
    name = f"mdpext-{uuid.uuid4().hex[:8]}"
    section = cluster.model_copy(update={"workers": workers})
    spec = cluster_manifest(section, name)
    try:
        # Test first: a cluster that fails while it is made fails again, at length, when it is closed.
        kr8s.api().version()
        kubernetes = stack.enter_context(
            KubeCluster(name=name, namespace=cluster.namespace, custom_cluster_spec=spec, quiet=True)
        )
    except Exception as error:  # the libraries below have no common base class
        raise ClusterError(f"cluster: Kubernetes does not answer: {first_line(error)}") from None
    return kubernetes, "no worker has come from Kubernetes", _HOUR


START: dict[str, Callable[[contextlib.ExitStack, ClusterSection, int], Start]] = {
    "local": _start_local,
    "address": _reach,
    "slurm": _start_slurm,
    "kubernetes": _start_kubernetes,
}
