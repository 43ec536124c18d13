#!/usr/bin/env bash
# Makes a bare Debian or Ubuntu machine ready to run or to test Millrace; `make` calls it, stamps remember it.
#
#   bootstrap.sh demo    .venv with the pinned dependencies of the demo, and Java 17+
#   bootstrap.sh test    the same with the test tools, and kcat, Burrow, openssl, Chromium, Maven, ip,
#                        mkfs.ext4 (as root), Prometheus; Apache Kafka's jars
#   bootstrap.sh peers   what the benchmark against other brokers needs besides: pika, RabbitMQ and ActiveMQ
#
# Whatever the machine lacks is installed with apt when this runs as root; otherwise one line says what to do.
set -euo pipefail

cd "$(dirname "$0")/.."
venv=.venv
minimum_java=17

say() { printf '%s\n' "$*" >&2; }
fail() { say "millrace: $*"; exit 1; }

# Quiet when it works; when it does not, what apt said last is shown.
apt_ready=
apt_install() {
    local log
    log=$(mktemp)
    if [ -z "$apt_ready" ]; then
        apt-get update -qq >"$log" 2>&1 || true      # an unreachable extra repository stops nothing
        apt_ready=yes
    fi
    if ! DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" \
        </dev/null >>"$log" 2>&1; then
        tail -n 5 "$log" >&2
        rm -f "$log"
        return 1
    fi
    rm -f "$log"
}
can_install() { [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        if [ -n "${PYTHON:-}" ]; then
            fail "PYTHON=$PYTHON is not a Python 3.11 or newer"
        fi
    done
    fail "no Python 3.11 or newer found: install one, or name it with PYTHON=/path/to/python3"
}

make_venv() {
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local python version
    python=$(find_python)
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        version=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        can_install || fail "$python lacks ensurepip: run  sudo apt-get install $version"
        say "installing $version"
        apt_install "$version" || apt_install python3-venv || fail "apt could not install $version"
    fi
    "$python" -m venv --clear "$venv"
}

install_package() {
    say "installing the pinned dependencies into $venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$1]"
}

java_is_there() {
    local java version
    for java in ${JAVA_HOME:+"$JAVA_HOME/bin/java"} java /usr/lib/jvm/*/bin/java; do
        version=$("$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1) || continue
        if [ "${version:-0}" -ge "$minimum_java" ]; then
            return 0
        fi
    done
    return 1
}

ensure_java() {
    local package
    java_is_there && return
    can_install || fail "no Java $minimum_java or newer: run  sudo apt-get install default-jre-headless"
    for package in default-jre-headless openjdk-21-jre-headless openjdk-17-jre-headless; do
        say "installing $package"
        apt_install "$package" || continue
        java_is_there && return
    done
    fail "apt has no Java $minimum_java or newer: install one and set JAVA_HOME"
}

# ensure_program PACKAGE PROGRAM...: any of the programs will do.
ensure_program() {
    local package=$1 program
    shift
    for program in "$@"; do
        command -v "$program" >/dev/null && return
    done
    can_install || fail "the tests need $1: run  sudo apt-get install $package"
    say "installing $package"
    apt_install "$package" || fail "apt could not install $package, which the tests need"
}

# ensure_service PACKAGE PROGRAM...: all of the programs. The package is a service too, which is not started by
# being installed here, unless the machine has a rule of its own about that.
ensure_service() {
    local package=$1 program policy=/usr/sbin/policy-rc.d status=0 missing=
    shift
    for program in "$@"; do
        command -v "$program" >/dev/null || missing=$program
    done
    [ -n "$missing" ] || return 0
    can_install || fail "the tests need $missing: run  sudo apt-get install $package"
    say "installing $package"
    if [ -e "$policy" ]; then
        apt_install "$package" || status=1
    else
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        apt_install "$package" || status=1
        rm -f "$policy"
    fi
    [ "$status" -eq 0 ] || fail "apt could not install $package, which the tests need"
}

# ensure_file PACKAGE FILE: for packages whose programs are not on the path.
ensure_file() {
    [ -e "$2" ] && return
    can_install || fail "the benchmark needs $1: run  sudo apt-get install $1"
    say "installing $1"
    apt_install "$1" || fail "apt could not install $1, which the benchmark needs"
}

# Compiles the numba kernels once, so that no broker, mirror or test waits for a compiler.
warm_kernels() {
    "$venv/bin/python" - <<'END'
import millrace.audit.scanning.row_records
import millrace.audit.scanning.scan
import millrace.audit.scanning.set_kernels
import millrace.audit.scanning.unpack
import millrace.broker.protocol.compaction_kernels
import millrace.broker.protocol.offsets_kernels
import millrace.broker.protocol.record_kernels
import millrace.broker.protocol.rewrite_kernels
import millrace.mirror.batches.coalesce_kernels
END
}

# What the gate's runs would each compile at their start, side by side.
compile_modules() {
    "$venv/bin/python" -m compileall -q -j 0 -x '/test_' broker mirror audit deploy tests
}

# What the gate's runs would fetch at once otherwise, side by side. A machine without a net can lint all the same.
gather_jars() {
    local peer
    for peer in kafka spark_kafka; do
        "$venv/bin/python" -m "tests.peers.$peer" >/dev/null 2>&1 ||
            say "Maven could not fetch the jars of tests/peers/$peer.py: the tests will try again"
    done
    "$venv/bin/python" -m tests.peers.spark_classes >/dev/null 2>&1 ||
        say "what Spark loads at each start could not be laid up: the tests will take longer"
}

# What collects a module with kernels compiles them where nobody has: this comes after warm_kernels.
rewrite_asserts() {
    "$venv/bin/python" -m tests.rewrite_ahead || say "not all tests can be collected: the tests will say why"
}

case "${1:-}" in
demo)
    make_venv
    install_package demo
    ensure_java
    warm_kernels
    ;;
test)
    make_venv
    install_package dev
    ensure_java
    ensure_program kcat kcat
    ensure_program openssl openssl
    ensure_program chromium chromium chromium-browser google-chrome
    ensure_program maven mvn
    ensure_program iproute2 ip
    # Only root can mount the disks that some tests break; to others /usr/sbin may not even be on the path.
    [ "$(id -u)" -ne 0 ] || ensure_program e2fsprogs mkfs.ext4
    ensure_service prometheus prometheus promtool
    ensure_service burrow Burrow
    # The compiler of kernels is busy on one core for a minute, Maven and two JVMs on another.
    warm_kernels &
    kernels=$!
    compile_modules
    gather_jars
    wait "$kernels" || fail "the compiled loops could not be made"
    rewrite_asserts
    ;;
peers)
    install_package dev,peers
    ensure_file rabbitmq-server /usr/lib/rabbitmq/bin/rabbitmq-server
    ensure_file activemq /usr/share/activemq/bin/activemq.jar
    ;;
*)
    fail "usage: $0 demo|test|peers"
    ;;
esac
