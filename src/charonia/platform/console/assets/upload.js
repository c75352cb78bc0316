// Uploads a model's folder, file or archive in pieces. Received pieces are kept: an interrupted upload continues later.

const PIECE_BYTES = 8 * 1024 * 1024;
const TRIES_MAX = 6;
const byId = (id) => document.getElementById(id);
const form = byId("upload");
const { uploads, api, pages } = form.dataset;
const csrf = document.querySelector('meta[name="csrf-token"]').content;

let files = [];  // { path, file }
let batch = null;
let abort = null;  // stops the upload; kept while it is paused, null after it was cancelled

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, method, body, isBytes = false) {
  const headers = { "X-CSRF-Token": csrf, "Content-Type": isBytes ? "application/octet-stream" : "application/json" };
  const response = await fetch(path, { method, headers, body: isBytes || !body ? body : JSON.stringify(body), signal: abort?.signal });
  const text = await response.text();
  if (!response.ok) throw new Refused(response.status, problemOf(text, response.status));
  return text ? JSON.parse(text) : null;
}

// ---- files

async function entriesOf(entry, folder = "") {
  if (entry.isFile) {
    const file = await new Promise((done, failed) => entry.file(done, failed));
    return [{ path: folder + file.name, file }];
  }
  const reader = entry.createReader();
  const found = [];
  for (;;) {  // it gives a hundred at a time
    const some = await new Promise((done, failed) => reader.readEntries(done, failed));
    if (!some.length) break;
    for (const each of some) found.push(...await entriesOf(each, `${folder}${entry.name}/`));
  }
  return found;
}

function nameOf(found) {
  const [top, ...rest] = found[0].path.split("/");
  const stem = rest.length ? top : top.replace(/(\.tar)?\.[A-Za-z]\w*$/, "");
  return stem.replace(/[^\w.-]+/g, "-");
}

const total = () => files.reduce((sum, { file }) => sum + file.size, 0);

function sizeText(bytes) {
  for (const [unit, name] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (bytes >= unit) return `${Number((bytes / unit).toPrecision(3))} ${name}`;
  return `${bytes} bytes`;
}

function choose(found) {
  files = found.filter(({ path }) => !path.split("/").some((part) => part.startsWith(".")));
  complain("");
  if (!files.length) return complain("The folder contains no files.");
  const what = files.length === 1 ? files[0].path : `${files[0].path.split("/")[0]}, ${files.length.toLocaleString("en")} files`;
  byId("chosen-text").textContent = `${what}, ${sizeText(total())}`;
  byId("chosen").hidden = false;
  byId("send").disabled = false;
  if (!byId("name").value) byId("name").value = nameOf(files);
  show(0, known() ? "Part of it was uploaded before: the upload continues from there." : "Ready to send");
  return undefined;
}

function complain(text) {
  byId("upload-problem").textContent = text;
  byId("upload-problem").hidden = !text;
}

function show(sent, text) {
  const share = total() ? sent / total() : 1;
  byId("sent").value = share;
  byId("sent-share").textContent = sent ? `${Math.floor(100 * share)} %` : "";
  byId("sent-text").textContent = text;
}

// ---- earlier uploads

const fingerprint = () => `upload ${form.dataset.uploads} ${JSON.stringify(files.map(({ path, file }) => [path, file.size, file.lastModified]))}`;

function known() {
  return localStorage.getItem(fingerprint());
}

async function begin() {
  const earlier = batch ?? known();
  if (earlier) {
    try {
      return await call(`${uploads}?batch=${earlier}`, "GET");
    } catch (error) {
      if (error.status !== 404) throw error;  // it has expired
    }
  }
  const records = await call(uploads, "POST", { files: files.map(({ path, file }) => ({ path, size: file.size })) });
  try {
    localStorage.setItem(fingerprint(), records[0].batch);
  } catch { /* then it can continue only in this page */ }
  return records;
}

// ---- sending

async function send() {
  const own = new AbortController();
  abort = own;
  complain("");
  running(true);
  let tries = 0;
  while (tries < TRIES_MAX && !own.signal.aborted) {
    let progress = 0;
    try {
      const records = await begin();
      batch = records[0].batch;
      let done = records.reduce((sum, { received }) => sum + received, 0);
      for (const record of records) {
        const { file } = files.find(({ path }) => path === record.path) ?? files[records.indexOf(record)];
        for (let at = record.received; at < record.size; at += PIECE_BYTES) {
          const piece = file.slice(at, at + PIECE_BYTES);
          show(done, `${sizeText(done)} of ${sizeText(total())} sent`);
          await call(`${uploads}/${record.key}?offset=${at}`, "PUT", piece, true);
          done += piece.size;
          progress += piece.size;
        }
      }
      show(total(), "Upload complete: creating the version");
      const name = byId("name").value.trim();
      const added = await call(`${api}/models/${encodeURIComponent(name)}/versions`, "POST",
        { source: { kind: "upload", place: batch }, notes: byId("notes").value });
      localStorage.removeItem(fingerprint());
      location.assign(`${pages}/${encodeURIComponent(added.model)}/versions/${added.number}`);
      return;
    } catch (error) {
      if (own.signal.aborted) break;
      tries = progress ? 1 : tries + 1;
      if (error instanceof Refused && error.status !== 503) {
        complain(error.message);
        break;
      }
      byId("sent-text").textContent = "Connection lost: retrying";
      await new Promise((later) => setTimeout(later, Math.min(500 * 2 ** tries, 8000)));
      if (tries >= TRIES_MAX) complain("The platform cannot be reached. The uploaded part is kept: continue when it is back.");
    }
  }
  if (own !== abort) return;
  running(false);
  if (own.signal.aborted) show(byId("sent").value * total(), "Paused");
}

function running(is) {
  byId("send").hidden = is;
  byId("pause").hidden = !is;
  byId("cancel").hidden = !is && !batch;
  byId("send").textContent = batch && !is ? "Continue" : "Upload";
}

async function cancel() {
  abort?.abort();
  abort = null;
  const given = batch;
  batch = null;
  localStorage.removeItem(fingerprint());
  running(false);
  show(0, "Cancelled");
  if (given) await call(`${uploads}?batch=${given}`, "DELETE").catch(() => {});
}

// ---- events

const zone = byId("dropzone");
for (const kind of ["dragenter", "dragover"])
  zone.addEventListener(kind, (event) => {
    event.preventDefault();
    zone.classList.add("over");
  });
for (const kind of ["dragleave", "drop"]) zone.addEventListener(kind, () => zone.classList.remove("over"));
zone.addEventListener("drop", async (event) => {
  event.preventDefault();
  const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  const found = await Promise.all(entries.map((entry) => entriesOf(entry)));
  choose(found.flat());
});
byId("pick-file").addEventListener("change", ({ target }) => choose([...target.files].map((file) => ({ path: file.name, file }))));
byId("pick-folder").addEventListener("change", ({ target }) => choose([...target.files].map((file) => ({ path: file.webkitRelativePath, file }))));
form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!byId("name").value.trim()) {
    complain("name: enter a name for the model");
    byId("name").focus();
  } else send();
});
byId("pause").addEventListener("click", ({ detail }) => detail > 1 || abort.abort());  // the second of a double click on Upload
byId("cancel").addEventListener("click", cancel);
addEventListener("beforeunload", (event) => {
  if (!byId("pause").hidden && byId("sent").value < 1) event.preventDefault();
});
