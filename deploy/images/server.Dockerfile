# A data server, without torch. From the top of the repository:
#     docker build -f deploy/images/server.Dockerfile -t disttrain-server .
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm AS build
WORKDIR /source
COPY . .
RUN python -m venv /opt/disttrain && /opt/disttrain/bin/pip install --no-cache-dir '.[server,storage]'
# Kernels are compiled for a processor level that all machines of the fleet have, not for the machine that builds:
# x86-64-v3 (AVX2: Intel since 2013, AMD since 2015), x86-64-v4 (AVX-512), or generic (any, and on Arm).
ARG CPU=x86-64-v3
ENV NUMBA_CPU_NAME=${CPU} NUMBA_CPU_FEATURES="" NUMBA_CACHE_DIR=/opt/kernels
RUN /opt/disttrain/bin/dataserver warm && chmod -R go-w,a+rX /opt/kernels

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/disttrain /opt/disttrain
COPY --from=build /opt/kernels /opt/kernels
# The server looks for kernels under the settings they were compiled with, and copies them to --cache-dir at its start.
ARG CPU=x86-64-v3
ENV NUMBA_CPU_NAME=${CPU} NUMBA_CPU_FEATURES="" NUMBA_CACHE_DIR=/opt/kernels
# Indexes of object stores are mirrored below it; the deployments mount a writable volume there.
ENV XDG_CACHE_HOME=/cache
USER 65532:65532
EXPOSE 50051 51051 9464
ENTRYPOINT ["/opt/disttrain/bin/dataserver"]
CMD ["--help"]
