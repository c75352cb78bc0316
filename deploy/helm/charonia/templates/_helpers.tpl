{{/* The name of all objects, at most 46 characters: Kubernetes shortens names of pods that are longer than 58 with their hashes,
and those of a CronJob may have 52. A longer one is shortened with a hash, so that no two releases have the same. */}}
{{- define "charonia.fullname" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $name = ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- end -}}
{{- $name = replace "." "-" $name -}}
{{- if regexMatch "^[0-9]" $name -}}{{- $name = printf "c%s" $name -}}{{- end -}}
{{- if gt (len $name) 46 -}}{{- $name = printf "%s-%s" (trunc 37 $name | trimSuffix "-") (sha256sum $name | trunc 8) -}}{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "charonia.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "charonia.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- define "charonia.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "charonia.imageFields" -}}
image: {{ include "charonia.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}

{{/* What a Service, a PodDisruptionBudget and the others select: the servers, not the pods of tests and jobs. */}}
{{- define "charonia.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "charonia.labels" -}}
{{ include "charonia.otherLabels" (dict "root" . "component" "server") }}
{{- end -}}

{{/* Labels of a component. Takes a dict of root and component, and of `more` labels, which come last. */}}
{{- define "charonia.otherLabels" -}}
{{- $own := dict
  "app.kubernetes.io/name" (default .root.Chart.Name .root.Values.nameOverride)
  "app.kubernetes.io/instance" .root.Release.Name
  "app.kubernetes.io/component" .component -}}
{{- $usual := dict
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "app.kubernetes.io/managed-by" .root.Release.Service
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- toYaml (mergeOverwrite $usual .root.Values.commonLabels (.more | default dict) $own) -}}
{{- end -}}

{{/* Name, namespace, labels and annotations of an object. Takes a dict of root and name, and of component, labels, annotations. */}}
{{- define "charonia.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "charonia.otherLabels" (dict "root" .root "component" (.component | default "server") "more" .labels) | nindent 2 }}
{{- with .annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Variables of a container, each once: the last of a name holds, so a user's replaces ours. Takes a list of lists. */}}
{{- define "charonia.env" -}}
{{- $all := list -}}
{{- range . -}}{{- $all = concat $all . -}}{{- end -}}
{{- $found := list -}}
{{- range $index, $entry := $all -}}
{{- $isLast := true -}}
{{- range slice $all (add1 $index | int) -}}{{- if eq .name $entry.name -}}{{- $isLast = false -}}{{- end -}}{{- end -}}
{{- if $isLast -}}{{- $found = append $found $entry -}}{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* A quantity as a number: 500m is 0.5. */}}
{{- define "charonia.number" -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- mulf (regexFind "^[0-9.]+" (toString .) | float64) (index $units (regexFind "[a-zA-Z]*$" (toString .)) | float64) -}}
{{- end -}}

{{/* Resources whose requests are no more than their limits, as Kubernetes requires: a limit lowers the request. */}}
{{- define "charonia.resources" -}}
{{- $resources := deepCopy . -}}
{{- range $name, $limit := $resources.limits -}}
{{- $request := dig "requests" $name "" $resources -}}
{{- if and $limit $request -}}
{{- if gt (include "charonia.number" $request | float64) (include "charonia.number" $limit | float64) -}}
{{- $_ := set $resources.requests $name $limit -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* "-" is the empty class, which binds volumes that have none. */}}
{{- define "charonia.storageClass" -}}
{{- if . -}}
storageClassName: {{ eq . "-" | ternary "" . | quote }}
{{- end -}}
{{- end -}}

{{/* Which families of addresses a Service has. */}}
{{- define "charonia.ipFamilies" -}}
{{- $service := .Values.service -}}
{{- $policy := $service.ipFamilyPolicy | default (ternary "PreferDualStack" "" (eq .Values.ipFamily "dual")) -}}
{{- with $policy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with $service.ipFamilies | default (ternary (list "IPv6") list (eq .Values.ipFamily "IPv6")) }}
ipFamilies: {{ toJson . }}
{{- end }}
{{- end -}}

{{/* What a port speaks, for gateways and meshes. Takes a list of root and protocol. */}}
{{- define "charonia.appProtocol" -}}
{{- $hasTls := not (empty (index . 0).Values.tls.existingSecret) -}}
appProtocol: {{ eq (index . 1) "http" | ternary (ternary "https" "http" $hasTls) (ternary "https" "kubernetes.io/h2c" $hasTls) }}
{{- end -}}

{{/* Metadata of the pods of tests and jobs. Takes a dict of root, component and own. */}}
{{- define "charonia.helperMetadata" -}}
labels:
  {{- include "charonia.otherLabels" (dict "root" .root "component" .component "more" .own.labels) | nindent 2 }}
annotations:
  {{- toYaml .own.annotations | nindent 2 }}
{{- end -}}

{{/* Where the pods of tests and jobs run: as the server's, if they say nothing. Takes a dict of root and own. */}}
{{- define "charonia.helperPod" -}}
{{- include "charonia.podSecurity" .root }}
{{- with .own.serviceAccountName }}
serviceAccountName: {{ . | quote }}
{{- end }}
{{- with .own.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .root.Values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- $root := .root -}}
{{- $own := .own -}}
{{- range $key := list "nodeSelector" "tolerations" }}
{{- with index $own $key | default (index $root.Values $key) }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "charonia.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  privileged: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{/* What all pods have: no token, no privilege, where the image comes from. */}}
{{- define "charonia.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- end -}}

{{- define "charonia.storeSecret" -}}
{{- if .Values.models.store.existingSecret -}}
{{- .Values.models.store.existingSecret -}}
{{- else if .Values.models.store.credentials -}}
{{- include "charonia.fullname" . }}-store
{{- end -}}
{{- end -}}

{{- define "charonia.apiKeysSecret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- .Values.apiKeys.existingSecret -}}
{{- else if .Values.apiKeys.file -}}
{{- include "charonia.fullname" . }}-api-keys
{{- end -}}
{{- end -}}

{{- define "charonia.modelsClaim" -}}
{{- .Values.models.pvc.claimName | default (printf "%s-models" (include "charonia.fullname" .)) -}}
{{- end -}}

{{- define "charonia.scheme" -}}
{{- ternary "HTTPS" "HTTP" (not (empty .Values.tls.existingSecret)) -}}
{{- end -}}

{{/* preStop, leaving clients and requests in flight, one after the other; then models finalize, for 15 s at most. */}}
{{- define "charonia.graceSeconds" -}}
{{- with .Values.drain -}}
{{- add .preStopSeconds .leaveSeconds .limitSeconds 15 -}}
{{- end -}}
{{- end -}}

{{/* Key of a file in the ConfigMap of models.files. */}}
{{- define "charonia.fileKey" -}}
{{- regexReplaceAll "[^-._a-zA-Z0-9]" . "__" -}}
{{- end -}}

{{- define "charonia.serveArgs" -}}
{{- $models := .Values.models -}}
{{- if eq $models.type "store" }}
{{- range $models.store.uris }}
- {{ printf "--model-repository=%s" . | quote }}
{{- end }}
{{- else if ne $models.type "none" }}
- {{ clean (printf "/models/%s" $models.path) | quote }}
{{- end }}
{{- with .Values.server }}
{{- if .modelControlMode }}
- --model-control-mode={{ .modelControlMode }}
{{- end }}
{{- range .loadModels }}
- {{ printf "--load-model=%s" . | quote }}
{{- end }}
{{- if ne (toString .frontEnds) "" }}
- --front-ends={{ .frontEnds }}
{{- end }}
- --exit-on-error={{ .exitOnError }}
- --strict-readiness={{ .strictReadiness }}
{{- if .accessLog }}
- --access-log={{ .accessLog }}
{{- end }}
{{- if .logVerbose }}
- --log-verbose={{ .logVerbose }}
{{- end }}
{{- if .modelIdleUnloadSeconds }}
- --model-idle-unload={{ .modelIdleUnloadSeconds }}
{{- end }}
{{- if .grpcMaxConnectionAgeSeconds }}
- --grpc-max-connection-age={{ mul .grpcMaxConnectionAgeSeconds 1000 }}
{{- end }}
{{- end }}
{{- if ne .Values.ipFamily "IPv4" }}
- "--host=*"
{{- end }}
{{- if not (dig "limits" "cpu" "" .Values.resources) }}
{{- if eq (toString .Values.cpuCores) "request" }}
- --cpu-cores=$(CHARONIA_REQUESTED_CORES)
{{- else if ne (toString .Values.cpuCores) "node" }}
- --cpu-cores={{ .Values.cpuCores }}
{{- end }}
{{- end }}
{{- if include "charonia.apiKeysSecret" . }}
- {{ printf "--api-keys=/etc/charonia/keys/%s" .Values.apiKeys.key | quote }}
{{- end }}
{{- if .Values.tls.existingSecret }}
{{- range list "http" "grpc" }}
- --{{ . }}-use-ssl=true
- --{{ . }}-server-cert=/etc/charonia/tls/tls.crt
- --{{ . }}-server-key=/etc/charonia/tls/tls.key
{{- end }}
{{- end }}
- --exit-delay-secs={{ .Values.drain.leaveSeconds }}
- --exit-timeout-secs={{ .Values.drain.limitSeconds }}
{{- range .Values.args }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "charonia.cacheClaim" -}}
accessModes: [ReadWriteOnce]
{{- with include "charonia.storageClass" .Values.cache.storageClass }}
{{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .Values.cache.size }}
{{- end -}}

{{/* Stops with a reason where values contradict each other, which a schema cannot say well. */}}
{{- define "charonia.check" -}}
{{- $v := .Values -}}
{{- if and (eq $v.models.type "store") (not $v.models.store.uris) -}}
{{- fail "models.type is store, and models.store.uris is empty: name a repository, such as s3://bucket/models" -}}
{{- end -}}
{{- if and (eq $v.models.type "image") (not $v.models.image.reference) -}}
{{- fail "models.type is image, and models.image.reference is empty: name an image, such as registry.example.org/models:1" -}}
{{- end -}}
{{- if and (eq $v.models.type "pvc") (not $v.models.pvc.create) (not $v.models.pvc.claimName) -}}
{{- fail "models.type is pvc, and there is neither models.pvc.claimName nor models.pvc.create" -}}
{{- end -}}
{{- if and $v.models.store.googleKeyFile (not (include "charonia.storeSecret" .)) -}}
{{- fail "models.store.googleKeyFile is a file of a Secret: models.store.existingSecret or models.store.credentials is missing" -}}
{{- end -}}
{{- range $key := list "name" "instance" "component" -}}
{{- if hasKey $v.podLabels (printf "app.kubernetes.io/%s" $key) -}}
{{- fail (printf "podLabels has app.kubernetes.io/%s, by which the Service selects its pods: use another name" $key) -}}
{{- end -}}
{{- end -}}
{{- $claims := list -}}
{{- range $v.resourceClaims -}}{{- $claims = append $claims .name -}}{{- end -}}
{{- range $v.resources.claims -}}
{{- if not (has .name $claims) -}}
{{- fail (printf "resources.claims names '%s', which is not in resourceClaims: add {name: %s, resourceClaimTemplateName: ...}" .name .name) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $v.models.type "image") (not $v.models.image.copy) (semverCompare "<1.33.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "models.type is image, and image volumes need Kubernetes 1.33 (this is %s): set models.image.copy true" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- $hasSurge := and (eq $v.kind "Deployment") (ne (dig "rollingUpdate" "maxSurge" 1 $v.updateStrategy | toString) "0") (ne (dig "type" "" $v.updateStrategy) "Recreate") -}}
{{- $isMany := or (gt (int $v.replicas) 1) (ne $v.autoscaling.type "none") $hasSurge -}}
{{- if and (eq $v.models.type "pvc") (has "ReadWriteOncePod" $v.models.pvc.accessModes) $isMany -}}
{{- fail "models.pvc.accessModes has ReadWriteOncePod, and an update starts a second pod: set replicas 1 and updateStrategy {type: Recreate}" -}}
{{- end -}}
{{- range $v.env -}}
{{- if and $v.extraPackages (eq .name "PYTHONPATH") (not (contains "/packages/site" (.value | default ""))) -}}
{{- fail "env has PYTHONPATH, which replaces that of extraPackages: add /packages/site to it" -}}
{{- end -}}
{{- end -}}
{{- if and (not (has $v.autoscaling.type (list "none"))) (gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) -}}
{{- fail (printf "autoscaling: minReplicas %v is more than maxReplicas %v" $v.autoscaling.minReplicas $v.autoscaling.maxReplicas) -}}
{{- end -}}
{{- if and (ne $v.autoscaling.type "none") (not (or $v.autoscaling.busyShare $v.autoscaling.waitRatio $v.autoscaling.cpuPercent $v.autoscaling.metrics $v.autoscaling.keda.triggers)) -}}
{{- fail "autoscaling has no measure: set autoscaling.busyShare, autoscaling.cpuPercent or autoscaling.metrics" -}}
{{- end -}}
{{- if and (eq $v.autoscaling.type "hpa") (lt (int $v.autoscaling.minReplicas) 1) -}}
{{- fail "autoscaling.minReplicas 0 needs autoscaling.type keda: a HorizontalPodAutoscaler keeps one pod" -}}
{{- end -}}
{{- if and (eq $v.autoscaling.type "keda") (lt (int $v.autoscaling.minReplicas) 1) (not $v.autoscaling.keda.triggers) -}}
{{- fail "autoscaling.minReplicas 0 needs a trigger in autoscaling.keda.triggers that sees requests without a pod, such as a metric of the gateway: no pod, no queue" -}}
{{- end -}}
{{- range $a := list "http" "grpc" -}}
{{- if and (index $v.gateway $a).enabled (not (index $v.gateway $a).parentRefs) -}}
{{- fail (printf "gateway.%s.parentRefs is empty: name the Gateway" $a) -}}
{{- end -}}
{{- if and (index $v.ingress $a).enabled (not (index $v.ingress $a).hosts) -}}
{{- fail (printf "ingress.%s.hosts is empty: name a host" $a) -}}
{{- end -}}
{{- end -}}
{{- if and $v.gateway.http.enabled $v.gateway.grpc.enabled -}}
{{- if or (not $v.gateway.http.hostnames) (not $v.gateway.grpc.hostnames) -}}
{{- fail "gateway: an HTTPRoute and a GRPCRoute of one Gateway need hostnames of their own in gateway.http.hostnames and gateway.grpc.hostnames" -}}
{{- end -}}
{{- range $v.gateway.grpc.hostnames -}}
{{- if has . $v.gateway.http.hostnames -}}
{{- fail (printf "gateway: %s is in http.hostnames and in grpc.hostnames; an HTTPRoute and a GRPCRoute cannot share one" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $v.tune.enabled -}}
{{- if not $v.tune.models -}}
{{- fail "tune.models is empty: name the models to tune" -}}
{{- end -}}
{{- if not $v.tune.server -}}
{{- if ne $v.server.modelControlMode "explicit" -}}
{{- fail "tune loads variants of models: set server.modelControlMode explicit and server.loadModels, or name another server in tune.server" -}}
{{- end -}}
{{- if or (include "charonia.apiKeysSecret" .) $v.tls.existingSecret -}}
{{- fail "tune sends no API key and speaks no TLS: tune a release without apiKeys and tls, or name another server in tune.server" -}}
{{- end -}}
{{- if or (ne (int $v.replicas) 1) (ne $v.autoscaling.type "none") -}}
{{- fail "tune needs one pod: with several, variants are loaded in one and measured in another. Set replicas 1, or name another server in tune.server" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A number as a quantity in thousandths: 0.5 is 500m. */}}
{{- define "charonia.milli" -}}
{{- printf "%.0fm" (mulf (float64 .) 1000) -}}
{{- end -}}

{{/* Up at once, down slowly: a pod that is added has models to load first. */}}
{{- define "charonia.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - type: Pods
      value: {{ .Values.autoscaling.scaleUpPods }}
      periodSeconds: 60
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleDownSeconds }}
  policies:
    - type: Pods
      value: 1
      periodSeconds: 60
{{- end -}}

{{/* Labels of the pods' metrics. */}}
{{- define "charonia.podSeries" -}}
{{- $pods := printf "%s-%s" (include "charonia.fullname" .) (ternary "[0-9]+" "[a-z0-9]+-[a-z0-9]+" (eq .Values.kind "StatefulSet")) -}}
{{- printf "{namespace=\"%s\",pod=~\"%s\"}" .Release.Namespace $pods -}}
{{- end -}}

{{/* As in files/prometheus-adapter.yaml, summed over the pods. */}}
{{- define "charonia.busyShareSum" -}}
{{- $pods := include "charonia.podSeries" . -}}
sum(max by (pod) (sum by (pod, model, version) (rate(charonia_load_seconds_total{{ $pods }}[2m])) / sum by (pod, model, version) (charonia_instances{{ $pods }})))
{{- end -}}

{{- define "charonia.waitRatioSum" -}}
{{- $pods := include "charonia.podSeries" . -}}
sum(clamp_max(sum by (pod) (rate(charonia_queue_duration_seconds_sum{{ $pods }}[2m])) / clamp_min(sum by (pod) (rate(charonia_compute_duration_seconds_sum{{ $pods }}[2m])), 0.1), 2))
{{- end -}}

{{/* Seconds of a time such as 90s, 10m or 2h. */}}
{{- define "charonia.seconds" -}}
{{- mul (regexFind "[0-9]+" .) (index (dict "s" 1 "m" 60 "h" 3600) (regexFind "[smh]$" .)) -}}
{{- end -}}

{{/* The model of `helm test`: as given; else the one of the built-in files, or the first that is tuned; "" for none. */}}
{{- define "charonia.testModel" -}}
{{- if not (kindIs "invalid" .Values.test.model) -}}
{{- .Values.test.model -}}
{{- else if and (eq .Values.models.type "files") (hasKey .Values.models.files "identity/config.pbtxt") -}}
identity
{{- else if not .Values.tune.server -}}
{{- first .Values.tune.models | default "" -}}
{{- end -}}
{{- end -}}

{{/* The specification of the Job that runs `charonia tune`. It waits for its models first. */}}
{{- define "charonia.tuneJob" -}}
{{- $host := .Values.tune.server | default (include "charonia.fullname" .) -}}
{{- $metrics := .Values.tune.server | default (printf "%s-headless" (include "charonia.fullname" .)) -}}
{{- $http := ternary 8000 .Values.service.httpPort (not (empty .Values.tune.server)) -}}
{{- $grpc := ternary 8001 .Values.service.grpcPort (not (empty .Values.tune.server)) -}}
{{- $wait := add .Values.probes.startupSeconds .Values.tune.waitSeconds -}}
backoffLimit: 0 # a second attempt would only repeat what the first one found
# The server starts and gets its models, then the budget, then a last variant may take as long to load.
activeDeadlineSeconds: {{ add (include "charonia.seconds" .Values.tune.timeBudget) $wait .Values.probes.startupSeconds 600 }}
template:
  metadata:
    {{- include "charonia.helperMetadata" (dict "root" . "component" "tune" "own" .Values.tune) | nindent 4 }}
  spec:
    restartPolicy: Never
    # The configurations of the server's models are put back before the end.
    terminationGracePeriodSeconds: 60
    {{- include "charonia.helperPod" (dict "root" . "own" .Values.tune) | nindent 4 }}
    initContainers:
      - name: wait-for-models
        {{- include "charonia.imageFields" . | nindent 8 }}
        command: [python, -c]
        args:
          - |
            import json, os, sys, time, urllib.request
            url, wait_s = os.environ["URL"], int(os.environ["WAIT_S"])
            missing, failure, end = set(os.environ["MODELS"].split(",")), "", time.monotonic() + wait_s
            while missing and time.monotonic() < end:
                try:
                    request = urllib.request.Request(url + "/v2/repository/index", b"{}", method="POST")
                    index = json.load(urllib.request.urlopen(request, timeout=10))
                    missing, failure = missing - {entry["name"] for entry in index}, ""
                except (OSError, ValueError) as error:
                    failure = f": {error}"
                time.sleep(2 if missing else 0)
            if missing:
                what = f"{url} has no model {', '.join(sorted(missing))} after {wait_s} s{failure}. Copy it to the repository"
                sys.exit(what)
        terminationMessagePolicy: FallbackToLogsOnError
        env:
          {{- include "charonia.env" (list (list
            (dict "name" "HOME" "value" "/tmp")
            (dict "name" "URL" "value" (printf "http://%s:%v" $host $http))
            (dict "name" "MODELS" "value" (join "," .Values.tune.models))
            (dict "name" "WAIT_S" "value" (toString $wait))) .Values.tune.env) | nindent 10 }}
        resources:
          {{- include "charonia.resources" .Values.initContainerResources | nindent 10 }}
        {{- include "charonia.containerSecurity" . | nindent 8 }}
        volumeMounts:
          - name: tmp
            mountPath: /tmp
    containers:
      - name: tune
        {{- include "charonia.imageFields" . | nindent 8 }}
        workingDir: /scratch
        command: [charonia, tune, profile]
        args:
          - {{ printf "--profile-models=%s" (join "," .Values.tune.models) | quote }}
          - --time-budget={{ .Values.tune.timeBudget }}
          - --triton-launch-mode=remote
          - --client-max-retries={{ min 10000 .Values.probes.startupSeconds }}
          - --triton-http-endpoint={{ $host }}:{{ $http }}
          - --triton-grpc-endpoint={{ $host }}:{{ $grpc }}
          - --triton-metrics-url=http://{{ $metrics }}:8002/metrics
          - --output-model-repository-path=/scratch/variants
          - --export-path=/scratch
          - --checkpoint-directory=/scratch/journal
          - --json=-
          {{- range .Values.tune.args }}
          - {{ . | quote }}
          {{- end }}
        env:
          {{- include "charonia.env" (list (list (dict "name" "HOME" "value" "/scratch")) .Values.tune.env) | nindent 10 }}
        resources:
          {{- include "charonia.resources" .Values.tune.resources | nindent 10 }}
        {{- include "charonia.containerSecurity" . | nindent 8 }}
        volumeMounts:
          - name: scratch
            mountPath: /scratch
          - name: tmp
            mountPath: /tmp
    volumes:
      - name: scratch
        emptyDir: {}
      - name: tmp
        emptyDir:
          sizeLimit: {{ .Values.tmpSize }}
{{- end -}}

{{/* A Job cannot be changed, so its name has a hash of its specification: a changed search is another Job, and the same is none. */}}
{{- define "charonia.tuneName" -}}
{{- $name := printf "%s-tune" (include "charonia.fullname" .) -}}
{{- if .Values.tune.schedule -}}{{ $name }}{{- else -}}{{ $name }}-{{ include "charonia.tuneJob" . | sha256sum | trunc 8 }}{{- end -}}
{{- end -}}
