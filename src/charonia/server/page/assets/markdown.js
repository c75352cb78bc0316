// Markdown as elements: text from models is only ever inserted as text, and links lead to http and https alone.

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(?=\S)(.+?)__|\*(?=\S)([^*]+?)\*|(?<!\w)_(?=\S)([^_]+?)_(?!\w)|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/;

function inlineMarkdown(text) {
  const parts = [];
  for (let rest = text; rest;) {
    const found = INLINE.exec(rest);
    if (!found) return [...parts, rest];
    if (found.index) parts.push(rest.slice(0, found.index));
    const [whole, , code, strong, underlined, emphasis, also, label, address] = found;
    if (code !== undefined) parts.push(element("code", {}, code.trim() || code));
    else if (strong ?? underlined) parts.push(element("strong", {}, ...inlineMarkdown(strong ?? underlined)));
    else if (emphasis ?? also) parts.push(element("em", {}, ...inlineMarkdown(emphasis ?? also)));
    else parts.push(element("a", { href: address, rel: "noopener noreferrer", target: "_blank" }, ...inlineMarkdown(label)));
    rest = rest.slice(found.index + whole.length);
  }
  return parts;
}

function codeBlock(source, language = "") {
  const text = element("pre", { tabindex: 0 }, source);
  return element("div", { class: "code" }, element("div", { class: "codebar" }, element("span", { class: "note" }, language),
    copyButton(() => source)), text);
}

function tableCells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

// Lists by indentation: an item has the lines below it that are indented further.
function listOf(lines) {
  const [, , mark] = ITEM.exec(lines[0]);
  const isOrdered = /\d/.test(mark);
  const indent = ITEM.exec(lines[0])[1].length;
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent) items.push([found[3]]);
    else items.at(-1).push(line.replace(/^ {1,4}|^\t/, ""));
  }
  const made = items.map(([first, ...rest]) => element("li", {}, ...inlineMarkdown(first), ...(rest.length ? markdown(rest.join("\n")) : [])));
  return element(isOrdered ? "ol" : "ul", isOrdered ? { start: parseInt(mark, 10) } : {}, ...made);
}

function markdown(source) {
  const lines = source.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  let at = 0;
  const take = (belongs) => {
    const from = at;
    while (at < lines.length && belongs(lines[at])) at++;
    return lines.slice(from, at);
  };
  const begins = (line) => FENCE.test(line) || ITEM.test(line) || HEADING.test(line) || RULE.test(line) || /^\s*>/.test(line);
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (!line.trim()) at++;
    else if (fence) {
      at++;
      const code = take((each) => !each.trim().startsWith(fence[1]));
      at++;  // an answer that is not complete lacks the end
      blocks.push(codeBlock(code.join("\n"), fence[2]));
    } else if (HEADING.test(line)) {
      const [, marks, text] = HEADING.exec(line);
      blocks.push(element(`h${Math.min(marks.length + 2, 6)}`, {}, ...inlineMarkdown(text)));
      at++;
    } else if (RULE.test(line)) {
      blocks.push(element("hr"));
      at++;
    } else if (/^\s*>/.test(line)) {
      blocks.push(element("blockquote", {}, ...markdown(take((each) => /^\s*>/.test(each)).map((each) => each.replace(/^\s*> ?/, "")).join("\n"))));
    } else if (ITEM.test(line)) {
      blocks.push(listOf(take((each) => ITEM.test(each) || /^\s+\S/.test(each))));
    } else if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "")) {
      const [head, , ...rows] = take((each) => each.includes("|")).map(tableCells);
      const row = (cells, kind) => element("tr", {}, ...cells.map((cell) => element(kind, {}, ...inlineMarkdown(cell))));
      blocks.push(element("div", { class: "wide" }, element("table", {}, element("thead", {}, row(head, "th")),
        element("tbody", {}, ...rows.map((cells) => row(cells, "td"))))));
    } else {
      blocks.push(element("p", {}, ...inlineMarkdown(take((each) => each.trim() && (each === line || !begins(each))).join("\n"))));
    }
  }
  return blocks;
}
