# Simulation:  docker build -t fedskew . && docker run --rm -v "$PWD/runs:/data/runs" fedskew run --data digits
# A site:      docker build -t fedskew --build-arg EXTRAS=flower . && docker run --rm -v "$PWD/site:/data" fedskew join ...
FROM python:3.11-slim
ARG EXTRAS=tune
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY src /src/src
# The versions that results depend on are the tested ones; Flower and the rest may have their own.
RUN grep -E "^(torch|numpy)==" /src/constraints.txt > /src/bits.txt \
    && pip install --no-cache-dir -c /src/bits.txt "/src[${EXTRAS}]" && useradd --create-home fedskew
USER fedskew
WORKDIR /data
ENTRYPOINT ["fedskew"]
CMD ["--help"]
