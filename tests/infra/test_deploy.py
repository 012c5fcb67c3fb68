"""The recipes of infra/deploy parse, say what the loader relies on, and grant no more than it needs."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import discover
from shard_tools import ShardWriter
from streaming import StreamingDataset
from streaming.errors import AccessDeniedError
from tests.support.code.folders import ROOT
from tests.support.servers.on_loopback import MotoServer

DEPLOY = ROOT / "infra" / "deploy"
SCRIPTS = ("slurm/train.sbatch", "torchrun/elastic.sh")
MANIFESTS = ("kubernetes/indexed-job.yaml", "kubernetes/jobset.yaml", "ray/rayjob.yaml")
READ_ACTIONS = {"s3:GetObject", "s3:ListBucket"}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def pod_specs(value: Any) -> list[dict[str, Any]]:
    """Every pod template's spec, at any depth."""
    if isinstance(value, list):
        return [spec for item in value for spec in pod_specs(item)]
    if not isinstance(value, dict):
        return []
    own = [value] if "containers" in value else []
    return own + [spec for item in value.values() for spec in pod_specs(item)]


def indexed_job() -> dict[str, Any]:
    return documents("kubernetes/indexed-job.yaml")[1]


def job_set_job() -> dict[str, Any]:
    return documents("kubernetes/jobset.yaml")[0]["spec"]["replicatedJobs"][0]["template"]


def test_the_readme_names_every_recipe() -> None:
    text = (DEPLOY / "README.md").read_text()
    for path in DEPLOY.rglob("*.*"):
        if path.name != "README.md":
            assert f"`{path.relative_to(DEPLOY)}`" in text or "policy" in path.name, path
    placeholders = {
        word for path in DEPLOY.rglob("*.yaml") for word in re.findall(r"\b[A-Z]{3,}(?:_[A-Z]+)*\b", path.read_text())
    }
    known = {"BUCKET", "REGISTRY", "TAG", "RAY_VERSION", "PROJECT"}
    variables = {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX", "ALL", "DNS"}
    assert placeholders <= known | variables
    assert all(f"`{word}`" in text for word in known)


# ------------------------------------------------------------------------------------------------- scripts


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse(name: str) -> None:
    checked = subprocess.run(["bash", "-n", DEPLOY / name], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "set -euo pipefail" in (DEPLOY / name).read_text()


def test_the_slurm_script_starts_tasks_that_find_themselves(tmp_path: Path) -> None:
    """Runs the script with stand-ins for scontrol, srun and python, and asks infra what the process is."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'node7\\nnode8\\n'\n")
    (tmp_path / "srun").write_text('#!/bin/sh\nshift\nSLURM_STEP_ID=0 SLURM_PROCID=9 SLURM_LOCALID=1 exec "$@"\n')
    (tmp_path / "python").write_text('#!/bin/sh\nenv; echo "ARGS $*"\n')
    for name in ("scontrol", "srun", "python"):
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "123"}
    environ |= {"SLURM_NTASKS": "16"}
    ran = subprocess.run(
        ["bash", DEPLOY / "slurm/train.sbatch", "--lr", "1 e"], env=environ, capture_output=True, text=True, check=True
    )
    seen = dict(line.split("=", 1) for line in ran.stdout.splitlines() if "=" in line)
    launch = discover(seen)
    assert (launch.rank, launch.world_size, launch.local_rank) == (9, 16, 1)
    assert (launch.master_addr, launch.master_port) == ("node7", 20123)
    assert "ARGS train.py --data s3://BUCKET/train/ --resume --lr 1 e" in ran.stdout


def test_slurm_directives_come_before_the_first_command() -> None:
    lines = (DEPLOY / "slurm/train.sbatch").read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    assert max(directives) < min(commands)
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", lines[number]) for number in directives)


def test_torchrun_knows_the_options_of_the_recipe() -> None:
    parser = importlib.import_module("torch.distributed.run").get_args_parser()
    text = (DEPLOY / "torchrun/elastic.sh").read_text()
    text = text.replace("${GPUS_PER_NODE:-8}", "8").replace("${RENDEZVOUS:?host:port of one node}", "node0:29400")
    words = shlex.split(text.replace("${RUN_ID:?one name per run}", "run7").replace("\\\n", " "), comments=True)
    arguments = parser.parse_args(words[words.index("torchrun") + 1 :])
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.max_restarts) == ("2:4", "8", 10)
    assert (arguments.rdzv_backend, arguments.training_script) == ("c10d", "train.py")


# ----------------------------------------------------------------------------------------------- manifests


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_have_what_every_object_has(name: str) -> None:
    for document in documents(name):
        assert {"apiVersion", "kind", "metadata", "spec"} == set(document)
        assert re.fullmatch(r"[a-z0-9-]{1,63}", document["metadata"]["name"])
    for spec in pod_specs(documents(name)):
        assert spec["serviceAccountName"] == "shard-reader"
        for container in spec["containers"]:
            assert {"requests", "limits"} == set(container["resources"])
            # Buffers are memory: a pod is killed at its limit, so it must be what it asked for.
            assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


def test_a_pod_of_the_indexed_job_finds_itself() -> None:
    service, job = documents("kubernetes/indexed-job.yaml")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    environ = {entry["name"]: entry["value"] for entry in container["env"]}
    assert all(isinstance(value, str) for value in environ.values())
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(environ["WORLD_SIZE"])
    for index in range(spec["completions"]):
        launch = discover(environ | {"JOB_COMPLETION_INDEX": str(index)})
        assert (launch.launcher, launch.rank, launch.world_size) == ("kubernetes", index, spec["completions"])
    # The first pod's name: job, index, and the headless service as its subdomain.
    assert environ["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    # podFailurePolicy is refused with any other restart policy.
    assert pod["restartPolicy"] == "Never"


def test_the_job_set_starts_torchrun_with_numbers_that_agree() -> None:
    (job_set,) = documents("kubernetes/jobset.yaml")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = job_set_job()["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    shell, option, command = container["command"]
    assert (shell, option) == ("bash", "-c")
    parser = importlib.import_module("torch.distributed.run").get_args_parser()
    arguments = parser.parse_args(shlex.split(command.replace("$JOB_COMPLETION_INDEX", "3"))[2:])
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(arguments.nnodes)
    assert int(arguments.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    # <JobSet>-<replicated job>-<job>-<pod>.<subdomain>, the subdomain being the JobSet's name by default.
    name = job_set["metadata"]["name"]
    assert arguments.master_addr == f"{name}-{replicated['name']}-0-0.{name}"
    assert replicated["replicas"] == 1, "JOB_COMPLETION_INDEX repeats in every replica"


def test_the_ray_job_has_a_head_and_workers() -> None:
    (job,) = documents("ray/rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert all(isinstance(value, str) for value in cluster["headGroupSpec"]["rayStartParams"].values())
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    images = {container["image"] for spec in pod_specs(job) for container in spec["containers"]}
    assert len(images) == 1, "head and workers need the same versions"


@pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None,
    reason="kubernetes-validate (over 100 MB of schemas) is not installed; the checks above run without it",
)
def test_core_objects_fit_the_schemas_of_kubernetes() -> None:
    validator = importlib.import_module("kubernetes_validate")
    inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": job_set_job()["spec"]}
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        for spec in pod_specs(documents("ray/rayjob.yaml"))
    ]
    for document in (*documents("kubernetes/indexed-job.yaml"), inner, *pods):
        validator.validate(document, "1.31", strict=True)


# ------------------------------------------------------------------------------------------------ permissions


@pytest.mark.parametrize("name", ["aws/read-shards.json", "aws/write-shards.json"])
def test_aws_policies_grant_the_prefix_and_nothing_else(name: str) -> None:
    policy = json.loads((DEPLOY / name).read_text())
    assert policy["Version"] == "2012-10-17"
    granted: set[str] = set()
    for statement in policy["Statement"]:
        assert set(statement) <= {"Sid", "Effect", "Action", "Resource", "Condition"}
        assert re.fullmatch(r"[A-Za-z0-9]+", statement["Sid"])
        assert statement["Effect"] == "Allow"
        assert not [action for action in statement["Action"] if "*" in action]
        granted |= set(statement["Action"])
        if statement["Action"] == ["s3:ListBucket"]:
            assert statement["Resource"] == ["arn:aws:s3:::BUCKET"]
            assert statement["Condition"] == {"StringLike": {"s3:prefix": ["train/*"]}}
        else:
            assert statement["Resource"] == ["arn:aws:s3:::BUCKET/train/*"]
    if "read" in name:
        assert granted == READ_ACTIONS
    else:
        assert granted == READ_ACTIONS | {"s3:PutObject", "s3:AbortMultipartUpload", "s3:DeleteObject"}


def test_aws_policies_suffice_and_keep_out(moto: MotoServer) -> None:
    """A server that enforces them: training reads with the one, packing writes with the other, and no further."""
    admin = {"endpoint_url": moto.url, "region_name": moto.region}
    admin |= {"aws_access_key_id": moto.key, "aws_secret_access_key": moto.secret}
    iam = importlib.import_module("boto3").client("iam", **admin)
    options = {}
    for name in ("read", "write"):
        iam.create_user(UserName=name)
        policy = (DEPLOY / f"aws/{name}-shards.json").read_text()
        iam.put_user_policy(UserName=name, PolicyName="shards", PolicyDocument=policy)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        options[name] = moto.storage_options | {"key": key["AccessKeyId"], "secret": key["SecretAccessKey"]}
    moto.create_bucket("BUCKET")

    def pack(prefix: str, who: str) -> None:
        with ShardWriter(f"s3://BUCKET/{prefix}/{{:06d}}.tar", storage_options=options[who]) as writer:
            for i in range(9):
                writer.write({"__key__": f"{i}", "cls": i})

    assert moto.request("POST", "/moto-api/reset-auth", body=b"0")[0] == 200
    try:
        pack("train", "write")
        dataset = StreamingDataset("s3://BUCKET/train/", storage_options=options["read"])
        assert [sample["cls"] for sample in map(dataset.__getitem__, range(9))] == list(range(9))
        for prefix, who in (("other", "write"), ("train2", "read")):
            with pytest.raises(AccessDeniedError):
                pack(prefix, who)
    finally:
        assert moto.request("POST", "/moto-api/reset-auth", body=b"inf")[0] == 200


@pytest.mark.parametrize(("kind", "role"), [("read", "shardReader"), ("write", "shardWriter")])
def test_gcs_roles_and_conditions(kind: str, role: str) -> None:
    (definition,) = documents(f"gcs/{kind}-role.yaml")
    assert set(definition) == {"title", "description", "stage", "includedPermissions"}
    verbs = {"get", "list"} | ({"create", "delete"} if kind == "write" else set())
    assert set(definition["includedPermissions"]) == {f"storage.objects.{verb}" for verb in verbs}
    policy = json.loads((DEPLOY / f"gcs/{kind}-policy.json").read_text())
    assert policy["version"] == 3, "conditions need version 3"
    (binding,) = policy["bindings"]
    assert binding["role"] == f"projects/PROJECT/roles/{role}"
    assert not {"allUsers", "allAuthenticatedUsers"} & set(binding["members"])
    expression = binding["condition"]["expression"]
    assert 'resource.name.startsWith("projects/_/buckets/BUCKET/objects/train/")' in expression
    assert 'objectListPrefix", "").startsWith("train/")' in expression
