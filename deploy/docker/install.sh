#!/bin/sh
# What the image runs: makes a virtual environment with this package, and Dask's settings where Dask looks for
# them in it.
#
#     sh deploy/docker/install.sh /opt/mdpext [EXTRAS]
set -eu

prefix=${1:?usage: install.sh PREFIX [EXTRAS]}
extras=${2-cloud,cluster,files}
source=$(cd "$(dirname "$0")/../.." && pwd)

"${PYTHON:-python3}" -m venv "$prefix"
"$prefix/bin/pip" install --no-cache-dir --disable-pip-version-check --quiet "$source${extras:+[$extras]}"
mkdir -p "$prefix/etc/dask"
cp "$source/deploy/dask.yaml" "$prefix/etc/dask/mdpext.yaml"
# Charts that are older than Dask 2026.6 call the programs so, which it does not bring any more.
for part in scheduler worker; do
  if [ ! -e "$prefix/bin/dask-$part" ]; then
    printf '#!/bin/sh\nexec "%s" %s "$@"\n' "$prefix/bin/dask" "$part" >"$prefix/bin/dask-$part"
    chmod 755 "$prefix/bin/dask-$part"
  fi
done
"$prefix/bin/mdpext" --help >/dev/null
"$prefix/bin/dask-scheduler" --version
"$prefix/bin/dask-worker" --version
