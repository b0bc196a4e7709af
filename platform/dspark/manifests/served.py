"""`serveConfigV2`: a deployment file as a cluster needs it, and how it gets into the manifests."""

import re
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from dspark.config import build_config, read_content
from dspark.engine.drafter_folder import WITHOUT_FOLDER
from dspark.manifests.documents import read_yaml
from dspark.manifests.surroundings import APP_FOLDER
from dspark.serving.deployment_file import DeploymentFile
from dspark.storage import is_remote

SERVED_FROM = "dspark-served-from"
"""Annotation of a RayService: the deployment file that its serveConfigV2 is."""
PORT = 8000
API_KEYS_FILE = "/etc/dspark/api-keys/keys"
KEY = "serveConfigV2"


def in_cluster(content: dict[str, Any]) -> dict[str, Any]:
    """A deployment file's content with what is different in a cluster, and nothing else.

    Pods are reached from outside of them, by a proxy on every node, at the port of the Service; clients need a key from
    the Secret; folders are those of the image.
    """
    changed = content | {"proxy_location": "EveryNode"}
    changed["http_options"] = content.get("http_options", {}) | {"host": "0.0.0.0", "port": PORT}
    changed["applications"] = [_application(application) for application in content.get("applications", [])]
    return changed


def _application(application: dict[str, Any]) -> dict[str, Any]:
    args = application["args"] | {"api_keys_file": API_KEYS_FILE}
    drafter = args.get("drafter")
    if drafter not in WITHOUT_FOLDER and not is_remote(drafter):
        args["drafter"] = str(PurePosixPath(APP_FOLDER, drafter))
    return application | {"args": args}


def deployed(root: Path, file: str) -> dict[str, Any]:
    """What a RayService says that serves the file. Raises: ValueError where the file is absent or refused."""
    path = root / file
    if not path.is_file():
        raise ValueError(f"{file} is no file")
    try:
        content = read_content(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, TypeError) as error:
        raise ValueError(f"{file} is no YAML mapping: {error}") from None
    build_config(DeploymentFile, content, source=file)
    return in_cluster(content)


def write_serve_configs(manifests: Path, root: Path) -> list[str]:
    """Write every serveConfigV2 anew whose RayService names its file. Returns the manifests that changed by it.

    Raises: ValueError for a deployment file that is refused.
    """
    changed = []
    for path in sorted(manifests.rglob("*.yaml")):
        contents, _ = read_yaml(path, root)
        for content in contents:
            annotations = (content.get("metadata") or {}).get("annotations") if isinstance(content, dict) else None
            if not annotations or SERVED_FROM not in annotations or KEY not in content.get("spec", {}):
                continue
            before = path.read_text(encoding="utf-8")
            after = with_serve_config(before, deployed(root, annotations[SERVED_FROM]))
            if after != before:
                path.write_text(after, encoding="utf-8")
                changed.append(str(path.relative_to(root)))
    return changed


def with_serve_config(manifest: str, content: dict[str, Any]) -> str:
    """A manifest's text with another block of text behind `serveConfigV2: |`; all else stays, comments too."""
    text = yaml.safe_dump(content, sort_keys=False, width=100, allow_unicode=True)

    def block(found: re.Match[str]) -> str:
        inner = found[1] + "  "
        return f"{found[1]}{KEY}: |\n" + "".join(f"{inner}{line}\n" for line in text.splitlines())

    pattern = rf"^( *){KEY}: \|\n(?:\1 +[^\n]*\n|\n)*"
    written, count = re.subn(pattern, block, manifest, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"a manifest holds `{KEY}: |` {count} times; write it once, as a block of text")
    return written
