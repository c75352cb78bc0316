#!/usr/bin/env bash
# Build the container image with docker, podman or buildah, whichever there is; the latter two need no root.
set -euo pipefail

usage="usage: deploy/image/build.sh [--variant cpu|cuda|torch|llm|platform] [--tag NAME] [--base IMAGE|debian]
                             [--certificates FILE] [--tree FOLDER] [ENGINE OPTIONS]
  --variant       what the image can run (default: cpu)
  --tag           its name (default: charonia:VARIANT)
  --base          image to begin with (default: that of the Dockerfile); 'debian' makes one with mmdebstrap
  --certificates  certificates of a proxy that stands between here and the package index
  --tree          also unpack its files to FOLDER/root, and write its configuration to FOLDER/image.json (with buildah)
ENGINE names the program to use (default: the first of docker, podman, buildah that works)."

variant=cpu tag="" tree="" options=()
while (($#)); do
  case $1 in
    --variant) variant=$2; shift ;;
    --tag) tag=$2; shift ;;
    --base) base=$2; shift ;;
    --certificates) options+=("--secret=id=certificates,src=$2"); shift ;;
    --tree) tree=$2 ENGINE=buildah; shift ;;
    -h | --help) echo "$usage"; exit ;;
    *) options+=("$1") ;;
  esac
  shift
done
cd "$(dirname "$0")/../.."
: "${tag:=charonia:$variant}"

has() { command -v "$1" >/dev/null; }
works() { has "$1" && { [ "$1" != docker ] || docker info >/dev/null 2>&1; }; }  # docker needs its service
if [ -z "${ENGINE:-}" ]; then
  for ENGINE in docker podman buildah none; do ! works "$ENGINE" || break; done
fi
case $ENGINE in
  none) echo "error: there is no docker with its service, podman or buildah; in Debian: apt install buildah uidmap" >&2; exit 1 ;;
  # Images of the OCI's own format have no health check.
  podman | buildah) options+=(--format=docker --layers) ;;
esac
# Where buildah may not make namespaces for each step, as in most containers, it changes its root.
[ "$ENGINE" != buildah ] || options+=(--isolation=chroot)

if [ "${base:-}" = debian ]; then
  has mmdebstrap || { echo "error: --base debian needs mmdebstrap; in Debian: apt install mmdebstrap" >&2; exit 1; }
  base=localhost/charonia-debian:trixie
  if ! "$ENGINE" inspect "$base" >/dev/null 2>&1; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    # The paths that Debian leaves out of its own slim image.
    mmdebstrap --quiet --variant=minbase --dpkgopt='path-exclude=/usr/share/locale/*' \
      --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
      --dpkgopt='path-include=/usr/share/doc/*/copyright' trixie "$folder/base.tar" http://deb.debian.org/debian
    printf 'FROM scratch\nADD base.tar /\n' >"$folder/Dockerfile"
    "$ENGINE" build --quiet --tag "$base" "$folder" >/dev/null
  fi
fi
[ -z "${base:-}" ] || options+=("--build-arg=BASE=$base")

"$ENGINE" build --file deploy/image/Dockerfile --tag "$tag" --build-arg "VARIANT=$variant" \
  --build-arg "VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" \
  --build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)" "${options[@]}" .

if [ -n "$tree" ]; then
  as_owner=(buildah unshare)
  [ "$(id -u)" != 0 ] || as_owner=()
  mkdir -p "$tree/root"
  buildah inspect --type image "$tag" >"$tree/image.json"
  container=$(buildah from --pull-never "$tag")
  "${as_owner[@]}" sh -c 'tar -C "$(buildah mount "$1")" -c .' - "$container" |
    tar -C "$tree/root" -x --no-same-owner --exclude='./dev/*'
  buildah rm "$container" >/dev/null
fi
