// Models and updates as streams of chunks (proto/FORMAT.md). Numbers are little-endian, as on all
// machines that Node.js runs on; so typed arrays are copied byte by byte.

import { createHash } from 'node:crypto';
import { createXXHash128 } from 'hash-wasm';

export const PARAMETERS = 1;
export const BUFFERS = 2;
export const COUNTERS = 3;
const SECTIONS = [PARAMETERS, BUFFERS, COUNTERS];
const CHUNK_BYTES = 1 << 20;
const INT8_BLOCK = 256;
const INT8_ELEMENTS = 1 << 19; // of a chunk: with its scales it has less than 1 MiB
const SMALLEST_SCALE = 2 ** -100;

const hasher = await createXXHash128();

/** Return the XXH3-128 checksum of some bytes, canonical. */
export function checksum(data) {
  return Buffer.from(hasher.init().update(data).digest('binary'));
}

/** A chunk that does not match its checksum, or is not the next one: fetch it again. */
export class DamagedTransfer extends Error {}

/** The three flat vectors of a model. */
export class Model {
  constructor(sizes) {
    this.vectors = {
      [PARAMETERS]: new Float32Array(sizes[PARAMETERS] ?? 0),
      [BUFFERS]: new Float32Array(sizes[BUFFERS] ?? 0),
      [COUNTERS]: new BigInt64Array(sizes[COUNTERS] ?? 0),
    };
  }

  /** Return an empty model of a Signature message. */
  static of(signature) {
    const sizes = {};
    for (const { shape, section } of signature.tensors) {
      const size = shape.reduce((product, length) => product * Number(length), 1);
      sizes[section] = (sizes[section] ?? 0) + size;
    }
    return new Model(sizes);
  }

  copy() {
    const sizes = SECTIONS.map((section) => [section, this.vectors[section].length]);
    const copy = new Model(Object.fromEntries(sizes));
    for (const section of SECTIONS) copy.vectors[section].set(this.vectors[section]);
    return copy;
  }

  get parameters() {
    return this.vectors[PARAMETERS];
  }
}

/** The digest of a stream: SHA-256 over the header fields of its chunks. */
export class Digest {
  #hash = createHash('sha256');

  add(chunk) {
    const fields = Buffer.alloc(21);
    fields.writeBigUInt64LE(BigInt(chunk.offset_bytes), 0);
    fields.writeUInt8(chunk.section, 8);
    fields.writeBigUInt64LE(BigInt(chunk.first_element), 9);
    fields.writeUInt32LE(chunk.elements, 17);
    this.#hash.update(fields).update(chunk.checksum);
  }

  value() {
    return this.#hash.copy().digest();
  }
}

const bytesOf = (values) => Buffer.from(values.buffer, values.byteOffset, values.byteLength);

/** Codecs of parameters: the elements of a chunk, and both directions. */
export const CODECS = {
  raw32: {
    elements: CHUNK_BYTES / 4,
    encode: (values) => Buffer.from(bytesOf(values)),
    decode: (data, into) => {
      if (data.length !== 4 * into.length) throw new Error('wrong length of a raw32 chunk');
      bytesOf(into).set(data);
    },
  },
  int8: {
    elements: INT8_ELEMENTS,
    encode: encodeInt8,
    decode: decodeInt8,
  },
};

/** Encode as int8: a scale for each block, then integers that are right on average. */
function encodeInt8(values) {
  const blocks = Math.ceil(values.length / INT8_BLOCK);
  const data = Buffer.alloc(4 * blocks + values.length);
  for (let block = 0; block < blocks; block++) {
    const first = block * INT8_BLOCK;
    const end = Math.min(first + INT8_BLOCK, values.length);
    let peak = 0;
    for (let i = first; i < end; i++) peak = Math.max(peak, Math.abs(values[i]));
    let scale = Math.fround((peak * (1 + 2 ** -20)) / 127);
    if (scale < SMALLEST_SCALE) scale = 0;
    data.writeFloatLE(scale, 4 * block);
    for (let i = first; scale > 0 && i < end; i++) {
      const rounded = Math.floor(values[i] / scale + Math.random());
      data.writeInt8(Math.max(-127, Math.min(127, rounded)), 4 * blocks + i);
    }
  }
  return data;
}

function decodeInt8(data, into) {
  const blocks = Math.ceil(into.length / INT8_BLOCK);
  if (data.length !== 4 * blocks + into.length) throw new Error('wrong length of an int8 chunk');
  for (let i = 0; i < into.length; i++) {
    const scale = data.readFloatLE(4 * Math.floor(i / INT8_BLOCK));
    into[i] = data.readInt8(4 * blocks + i) * scale; // rounded once, to binary32
  }
}

/** Return the chunks, the digest and the size of a model, or of an update in a codec. */
export function encode(model, codec = 'raw32') {
  const chunks = [];
  const digest = new Digest();
  let offset = 0;
  for (const section of SECTIONS) {
    const values = model.vectors[section];
    const { elements, encode: encoded } = section === PARAMETERS ? CODECS[codec] : CODECS.raw32;
    const most = section === COUNTERS ? CHUNK_BYTES / 8 : elements;
    for (let first = 0; first < values.length; first += most) {
      const part = values.subarray(first, first + most);
      const data = encoded(part);
      const chunk = {
        offset_bytes: offset,
        data,
        checksum: checksum(data),
        section,
        first_element: first,
        elements: part.length,
      };
      digest.add(chunk);
      chunks.push(chunk);
      offset += data.length;
    }
  }
  return { chunks, digest: digest.value(), sizeBytes: offset };
}

/** Decodes a stream into a model, chunk by chunk; every chunk is checked before it is used. */
export class Decoder {
  offsetBytes = 0;
  #digest = new Digest();
  #section = 0; // index into SECTIONS
  #element = 0;

  constructor(model, codec = 'raw32') {
    this.model = model;
    this.codec = codec;
  }

  take(chunk) {
    if (chunk.data.length > CHUNK_BYTES) throw new Error('a chunk is longer than 1 MiB');
    if (Number(chunk.offset_bytes) !== this.offsetBytes) {
      throw new DamagedTransfer('a chunk is not the next one');
    }
    if (!checksum(chunk.data).equals(chunk.checksum)) {
      throw new DamagedTransfer(`the chunk at byte ${this.offsetBytes} is damaged`);
    }
    this.#skipFullSections();
    const section = SECTIONS[this.#section];
    const values = this.model.vectors[section];
    const end = this.#element + chunk.elements;
    const isNext = chunk.section === section && Number(chunk.first_element) === this.#element;
    if (!isNext || !(end > this.#element && end <= values.length)) {
      throw new Error('a chunk does not have the elements that follow');
    }
    this.#decode(section, chunk.data, values.subarray(this.#element, end));
    this.#digest.add(chunk);
    this.#element = end;
    this.offsetBytes += chunk.data.length;
  }

  /** Check that nothing is missing, and that the digest is the expected one. */
  finish(digest) {
    this.#skipFullSections();
    const values = this.model.vectors[SECTIONS[this.#section]];
    if (this.#section < SECTIONS.length - 1 || this.#element < values.length) {
      throw new DamagedTransfer('the stream ended early');
    }
    if (!this.#digest.value().equals(digest)) {
      throw new DamagedTransfer('the stream does not have the expected digest');
    }
  }

  #decode(section, data, into) {
    if (section === COUNTERS) {
      if (data.length !== 8 * into.length) throw new Error('wrong length of a chunk of counters');
      bytesOf(into).set(data);
      return;
    }
    CODECS[section === PARAMETERS ? this.codec : 'raw32'].decode(data, into);
    if (!into.every(Number.isFinite)) throw new Error('a value is not finite');
  }

  #skipFullSections() {
    while (
      this.#section < SECTIONS.length - 1 &&
      this.#element === this.model.vectors[SECTIONS[this.#section]].length
    ) {
      this.#section += 1;
      this.#element = 0;
    }
  }
}

/** Return an update: received - trained parameters, and the trained buffers and counters. */
export function difference(received, trained) {
  const update = trained.copy();
  for (let i = 0; i < update.parameters.length; i++) {
    update.parameters[i] = received.parameters[i] - trained.parameters[i];
  }
  return update;
}

/** What updates lost to their codec; it is added to the next one. */
export class ErrorFeedback {
  #residual = null; // Float32Array; null means zeros
  #pending = null;

  forget() {
    this.#residual = this.#pending = null;
  }

  /** Add the residual to an update, encode it, and note what the encoding loses. */
  encode(update, codec) {
    const vector = update.parameters;
    if (this.#residual) for (let i = 0; i < vector.length; i++) vector[i] += this.#residual[i];
    const encoded = encode(update, codec);
    const decoder = new Decoder(update.copy(), codec);
    encoded.chunks.forEach((chunk) => decoder.take(chunk));
    this.#pending = vector.map((value, i) => value - decoder.model.parameters[i]);
    return encoded;
  }

  /** Adopt the residual of the newest update if it counts. */
  settle(counts) {
    if (counts && this.#pending) this.#residual = this.#pending;
    this.#pending = null;
  }
}
