# Simulation:  docker build -t fedskew . && docker run --rm -v "$PWD/runs:/data/runs" fedskew run --data digits
# A site:      docker build -t fedskew --build-arg EXTRAS=flower . && docker run --rm -v "$PWD/site:/data" fedskew join ...
FROM python:3.11-slim
ARG EXTRAS=tune
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir "/src[${EXTRAS}]" && useradd --create-home fedskew
USER fedskew
WORKDIR /data
ENTRYPOINT ["fedskew"]
CMD ["--help"]
