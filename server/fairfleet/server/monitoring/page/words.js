// Numbers and times as text.
export const NONE = "–";

export const percent = (share) => (share == null ? NONE : `${(100 * share).toFixed(1)} %`);
/** Differences of percentages, in percentage points. */
export const points = (share) => (share == null ? NONE : `${Math.abs(100 * share).toFixed(1)} pp`);
export const changed = (share) => (share == null ? NONE : `${share >= 0 ? "+" : "−"}${points(share)}`);

export function number(value) {
  if (value == null) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(1).replace("-", "−");
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 3).replace("-", "−");
}

export function duration(seconds) {
  if (seconds == null) return NONE;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (count >= 1000 && place < units.length - 1) [count, place] = [count / 1000, place + 1];
  return `${count.toFixed(place && count < 100 ? 1 : 0)} ${units[place]}`;
}

export const whole = (count) => count.toLocaleString("en-US");
export const plural = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;
export const clock = (unix) => new Date(1000 * unix).toLocaleTimeString([], { hour12: false });
