// Opens every page in a real browser, in both themes and at a phone's width; prints what it saw as JSON.
// OWN are the pages of a server, whose jobs are chosen from. Usage: node browser.mjs PLAYWRIGHT CHROMIUM URL FOLDER OWN PAGE...
import { createRequire } from "node:module";
import { join } from "node:path";

const [playwright, executablePath, url, folder, own, ...pages] = process.argv.slice(2);
const { chromium } = createRequire(join(playwright, "x.js"))("playwright-core");
const READY = {
  fleet: "tbody tr",
  dataset: ".sample img",
  step: "canvas.timeline",
};
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const seen = { errors: [], dialogs: [], requests: [], wide: {}, texts: {}, keys: [] };

async function open(theme, width, height) {
  const context = await browser.newContext({
    viewport: { width, height },
    colorScheme: theme,
    reducedMotion: "reduce",
  });
  const page = await context.newPage();
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  page.on(
    "console",
    (message) => message.type() === "error" && seen.errors.push(`${message.text()} ${message.location().url}`),
  );
  page.on("dialog", (dialog) => {
    seen.dialogs.push(dialog.message());
    dialog.dismiss();
  });
  page.on("request", (request) => request.url().startsWith(url) || request.url().startsWith(own) || seen.requests.push(request.url()));
  return page;
}

for (const [theme, width, height] of [
  ["light", 1280, 900],
  ["dark", 1280, 900],
  ["dark", 390, 844],
  ["light", 390, 844],
]) {
  const page = await open(theme, width, height);
  for (const name of pages) {
    await page.goto(`${url}#${name}`);
    await page.waitForSelector(READY[name.split("?")[0]], { timeout: 60000 });
    await page.waitForTimeout(1500);
    const short = name.split("?")[0];
    seen.wide[`${short} ${width}`] = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    seen.texts[short] = await page.evaluate(() => document.body.innerText);
    await page.screenshot({ path: join(folder, `${short}-${theme}-${width}.png`), fullPage: true });
  }
  await page.context().close();
}

const page = await open("light", 1280, 900);
await page.goto(url);
await page.waitForSelector(READY.fleet);
await page.keyboard.press("2");
await page.waitForSelector(READY.dataset);
seen.keys.push(await page.evaluate(() => location.hash));
await page.keyboard.press("/");
seen.keys.push(await page.evaluate(() => document.activeElement.name));
await page.keyboard.type("00001000");
await page.keyboard.press("Enter");
await page.waitForFunction(() => location.hash.includes("key=00001000"));
await page.waitForSelector(".sample img");
await page.locator(".sample").first().focus();
await page.keyboard.press("Enter");
await page.waitForSelector("dialog[open] figure");
const first = await page.locator("dialog h2").innerText();
await page.screenshot({ path: join(folder, "sample-light-1280.png") });
await page.keyboard.press("ArrowRight");
await page.waitForFunction((before) => document.querySelector("dialog h2").innerText !== before, first);
await page.keyboard.press("Escape");
seen.keys.push(await page.locator("dialog[open]").count());
await page.keyboard.press("Tab");
await page.locator("body").click({ position: { x: 1, y: 1 } });
await page.keyboard.press("t");
seen.keys.push(await page.evaluate(() => document.documentElement.dataset.theme));
seen.frames = await page.evaluate(async () => {
  location.hash = "fleet";
  let longest = 0,
    last = performance.now();
  while (performance.now() < last + 1 && longest < 1) await new Promise(requestAnimationFrame);
  const end = performance.now() + 4000;
  for (last = performance.now(); performance.now() < end;) {
    await new Promise(requestAnimationFrame);
    longest = Math.max(longest, performance.now() - last);
    last = performance.now();
  }
  return longest;
});
await page.goto(`${url}#step?step=1`);
await page.waitForSelector(READY.step);
await page.locator("canvas.timeline").focus();
await page.keyboard.press("+");
await page.getByRole("button", { name: "Compare" }).click();
await page.getByText("(this job)").first().waitFor({ timeout: 120000 });
await page.screenshot({ path: join(folder, "policies-light-1280.png"), fullPage: true });
await page.goto(`${own}#step?step=1`);
await page.waitForSelector("select:not([hidden]) option", { state: "attached", timeout: 60000 });
await page.waitForSelector(READY.step);
const jobs = page.getByLabel("Job");
seen.jobs = await jobs.locator("option").evaluateAll((options) => options.map((option) => option.value));
seen.chosen = [await jobs.inputValue()];
const other = seen.jobs.find((job) => job !== seen.chosen[0]);
await jobs.selectOption(other);
await page.waitForFunction((job) => location.hash.includes(job), other);
await page.getByText(`job ${other.slice(0, 12)}`).waitFor({ timeout: 60000 });
seen.chosen.push(await jobs.inputValue());
await page.screenshot({ path: join(folder, "server-step-light-1280.png"), fullPage: true });
await page.goto(`${own}#step?job=${"0".repeat(64)}&step=0`);
await page.getByText("this server knows no job").waitFor({ timeout: 60000 });
await browser.close();
console.log(JSON.stringify(seen));
