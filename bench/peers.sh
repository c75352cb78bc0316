#!/usr/bin/env bash
# Installs the peers from the package registry, beside the project and never inside its environment: tritonserver 2.51 (CPU)
# with its Python backend, perf_analyzer 2.48 and tritonclient. Takes about a minute; running it again is harmless.
#
#   bench/peers.sh [--tuners] [FOLDER]     default: ~/.cache/charonia-peers; --tuners: model-analyzer too
#
# Afterwards FOLDER/bin holds `tritonserver` and `perf_analyzer`.
set -euo pipefail

tuners=
if [ "${1:-}" = --tuners ]; then tuners=yes && shift; fi
folder=${1:-$HOME/.cache/charonia-peers}
python=${PYTHON:-python3.11}
mkdir -p "$folder/bin" "$folder/lib"
folder=$(cd "$folder" && pwd)
venv=$folder/venv/bin

[ -x "$venv/python" ] || "$python" -m venv "$folder/venv"
"$venv/python" -c 'import pytriton, tritonclient, onnxruntime' 2>/dev/null ||
  "$venv/pip" install -q --disable-pip-version-check 'nvidia-pytriton==0.7.0' 'tritonclient[all]' onnxruntime

site=$("$venv/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
libpython=$("$venv/python" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')
version=$("$venv/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# The server of the wheel, with the stub of its Python backend for our version of Python.
if [ ! -d "$folder/triton" ]; then
  cp -r "$site/pytriton/tritonserver" "$folder/triton.partial"
  install -m755 "$folder/triton.partial/python_backend_stubs/$version/triton_python_backend_stub" \
    "$folder/triton.partial/backends/python/"
  chmod +x "$folder/triton.partial/bin/tritonserver"
  mv "$folder/triton.partial" "$folder/triton"
fi
cat > "$folder/bin/tritonserver" <<END
#!/usr/bin/env bash
export LD_LIBRARY_PATH="$site/nvidia_pytriton.libs:$libpython" PATH="$venv:\$PATH"
exec "$folder/triton/bin/tritonserver" --backend-directory="$folder/triton/backends" --cache-directory="$folder/triton/caches" "\$@"
END

# The last wheel of tritonclient that carries perf_analyzer; two libraries that it wants come with the server's wheel.
if [ ! -x "$folder/lib/perf_analyzer" ]; then
  wheels=$(mktemp -d)
  "$venv/pip" download -q --disable-pip-version-check --no-deps --only-binary=:all: --platform manylinux1_x86_64 \
    -d "$wheels" tritonclient==2.48.0
  "$venv/python" -m zipfile -e "$wheels"/tritonclient-2.48.0*.whl "$wheels"
  install -m755 "$wheels"/tritonclient-2.48.0.data/data/bin/perf_analyzer "$folder/lib/"
  rm -r "$wheels"
  ln -sf "$site"/nvidia_pytriton.libs/libcudart-*.so* "$folder/lib/libcudart.so.12"
  ln -sf "$site"/nvidia_pytriton.libs/libb64-*.so* "$folder/lib/libb64.so.0d"
fi
cat > "$folder/bin/perf_analyzer" <<END
#!/usr/bin/env bash
LD_LIBRARY_PATH="$folder/lib" exec "$folder/lib/perf_analyzer" "\$@"
END

# In an environment of its own: it wants other versions of the client.
if [ -n "$tuners" ] && [ ! -x "$folder/ma_venv/bin/model-analyzer" ]; then
  "$python" -m venv "$folder/ma_venv"
  "$folder/ma_venv/bin/pip" install -q --disable-pip-version-check 'triton-model-analyzer==1.58.0'
fi

chmod +x "$folder/bin/"*
"$folder/bin/perf_analyzer" --version
echo "peers are in $folder/bin"
