# The trainer, with torch and the CUDA libraries that PyPI's torch brings. From the top of the repository:
#     docker build -f deploy/images/trainer.Dockerfile -t disttrain-trainer .
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm AS build
WORKDIR /source
# Torch has a layer of its own: it is 3 GB and changes least.
ARG TORCH=2.13.0
RUN python -m venv /opt/disttrain && /opt/disttrain/bin/pip install --no-cache-dir "torch==${TORCH}"
COPY . .
RUN /opt/disttrain/bin/pip install --no-cache-dir '.[train]'

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/disttrain /opt/disttrain
ENV PATH=/opt/disttrain/bin:${PATH}
USER 65532:65532
CMD ["trainclient", "--help"]
