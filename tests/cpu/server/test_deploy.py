"""The files of deploy/: they name flags, paths and times that the server has."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from strandline.cli import build_parser
from strandline.records.messages import FLUSH_S
from strandline.server.http.gate import OPEN_PATHS
from tests.cpu.server.process import running_server

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
POD = yaml.safe_load((DEPLOY / "kubernetes/single/statefulset.yaml").read_text())["spec"]["template"]["spec"]
SERVER = POD["containers"][0]
COMPOSE = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
UNIT = (DEPLOY / "systemd/strandline.service").read_text()
CONTAINERFILE = (DEPLOY / "container/Containerfile").read_text()


def flags_of(arguments: list[str]) -> set[str]:
    return {argument.split("=")[0] for argument in arguments if argument.startswith("--")}


def values(node: Any, key: str) -> Iterator[Any]:
    """Yield what a document has under a key, wherever it is."""
    if isinstance(node, dict):
        yield from (node[key],) if key in node else ()
        node = list(node.values())
    for each in node if isinstance(node, list) else ():
        yield from values(each, key)


def test_flags_exist() -> None:
    [command] = re.findall("^ExecStart=(.*)$", UNIT, re.MULTILINE)
    start = (DEPLOY / "container/start").read_text()
    patches = re.findall(r"value: (--\S+)\}", (DEPLOY / "kubernetes/data-parallel/kustomization.yaml").read_text())
    used = flags_of([*SERVER["args"], *COMPOSE["services"]["strandline"]["command"], *patches])
    used |= flags_of(shlex.split(command)) | flags_of(start.split())
    assert len(used) >= 7
    assert used <= set(build_parser().parse_args(["serve"]).parser._option_string_actions)


def test_arguments_are_accepted() -> None:
    options = build_parser().parse_args(["serve", *SERVER["args"], "--host", "0.0.0.0", "--port", "8000"])
    assert options.disk_cache.startswith("/var/lib/strandline/")


def test_probes_ask_an_endpoint_that_needs_no_key() -> None:
    probes = [SERVER[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    assert {probe["httpGet"]["path"] for probe in probes} == {"/health"}
    assert "/health" in OPEN_PATHS
    # A hung engine may continue: it is taken out of the service at once, and restarted later.
    readiness, liveness = (probe["periodSeconds"] * probe["failureThreshold"] for probe in probes[1:])
    assert readiness <= 15 < 60 <= liveness


def drain_s(arguments: list[str]) -> float:
    """Return how long a server with these arguments takes to stop, at most."""
    limit_s = build_parser().parse_args(["serve", *arguments]).request_timeout_s
    assert limit_s is not None
    return float(limit_s) + FLUSH_S


def test_grace_periods_cover_the_drain() -> None:
    pre_stop_s = SERVER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["terminationGracePeriodSeconds"] >= pre_stop_s + drain_s(SERVER["args"])
    service = COMPOSE["services"]["strandline"]
    grace_s = int(service["stop_grace_period"].removesuffix("s"))
    assert grace_s >= drain_s([each.replace("${DISK_CACHE_SIZE:-20GiB}", "20GiB") for each in service["command"]])
    [command] = re.findall("^ExecStart=.* serve (.*)$", UNIT, re.MULTILINE)
    [stop_s] = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert int(stop_s) >= drain_s(command.replace("$MODEL", "demo").replace("$FLAGS", "").split())


def test_only_volumes_are_written_to() -> None:
    assert SERVER["securityContext"]["readOnlyRootFilesystem"]
    assert COMPOSE["services"]["strandline"]["read_only"]
    [declared] = re.findall(r"^VOLUME (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    declared = set(yaml.safe_load(declared))
    mounted = {mount["mountPath"] for mount in SERVER["volumeMounts"]}
    assert declared <= mounted
    for name in ("HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"):
        [path] = re.findall(rf"{name}=(/var\S+)", CONTAINERFILE)
        assert any(path == volume or path.startswith(f"{volume}/") for volume in declared)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_unit_is_valid(tmp_path: Path) -> None:
    unit = tmp_path / "strandline.service"
    # That the command exists is checked, too.
    unit.write_text(UNIT.replace("/opt/strandline/bin/strandline", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_base_image_is_named_once() -> None:
    assert re.findall(r"^FROM (\S+)", CONTAINERFILE, re.MULTILINE) == ["${BASE}", "${BASE}"]
    assert len(re.findall(r"^ARG BASE=\S+$", CONTAINERFILE, re.MULTILINE)) == 1


def mounted_file(service: str, target: str) -> Path:
    """Return the file of this repository that a compose service finds at a path."""
    mounts = (volume.split(":") for volume in COMPOSE["services"][service]["volumes"])
    [source] = (mount[0] for mount in mounts if mount[1] == target)
    return (DEPLOY / "compose" / source).resolve()


def test_compose_gives_gpus_to_the_image_for_them() -> None:
    [(name, changed)] = yaml.safe_load((DEPLOY / "compose/compose.cuda.yaml").read_text())["services"].items()
    assert changed["devices"] == ["nvidia.com/gpu=all"]
    for service, variant in ((COMPOSE["services"][name], "cpu"), (changed, "cuda")):
        assert service["image"] == f"strandline:{variant}"
        assert service["build"]["args"] == {"VARIANT": variant}


def test_compose_has_prometheus_scrape_the_server() -> None:
    config = yaml.safe_load(mounted_file("prometheus", "/etc/prometheus/prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["strandline:8000"]}]
    assert COMPOSE["services"]["strandline"]["ports"] == ["127.0.0.1:8000:8000"]


def test_compose_has_grafana_load_the_dashboard() -> None:
    provisioning = "/etc/grafana/provisioning"
    source = yaml.safe_load(mounted_file("grafana", f"{provisioning}/datasources/strandline.yaml").read_text())
    assert [each["url"] for each in source["datasources"]] == ["http://prometheus:9090"]
    dashboards = yaml.safe_load(mounted_file("grafana", f"{provisioning}/dashboards/strandline.yaml").read_text())
    [folder] = (each["options"]["path"] for each in dashboards["providers"])
    assert mounted_file("grafana", f"{folder}/strandline.json") == ROOT / "docs/grafana-dashboard.json"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_manifest_is_yaml_and_names_files_that_exist(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        for resources in values(document, "resources"):
            if isinstance(resources, list):
                assert all((path.parent / each).exists() for each in resources)


def test_ray_service_has_the_applications_arguments() -> None:
    from strandline.ray.options import read_options

    service = yaml.safe_load((DEPLOY / "kubernetes/ray/rayservice.yaml").read_text())
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == "strandline.ray:build_app"
    options = read_options(application["args"])
    assert options.engine_config.model == "demo"
    assert options.server_config.port == 8000


def test_rollout_hits_what_the_old_server_had_cached(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, bytes_dir: Path
) -> None:
    """The signals of a rollout: SIGTERM, and another server on the same volume."""
    flags = ["--disk-cache", str(tmp_path / "volume"), "--disk-cache-size", "1GiB", "--request-timeout-s", "300"]
    body: dict[str, Any] = {"prompt": "a prompt that outlives its server " * 8, "max_tokens": 4, "temperature": 0}
    cached = []
    for number in range(2):
        with running_server(bytes_dir, tmp_path / f"log-{number}", *flags) as server:
            usage = server.post("/v1/completions", **body).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            server.signal(signal.SIGTERM)
            assert server.exit_code() == 0
            assert "every request was answered" in server.log()
    assert cached == [0, len(body["prompt"])]
