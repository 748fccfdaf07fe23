// The test vectors of proto/vectors/streams.json: node --test

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import test from 'node:test';

import { CODECS, Decoder, Digest, ErrorFeedback, Model } from './streams.mjs';
import { checksum, difference, encode } from './streams.mjs';
import { Solver, batches } from './training.mjs';

const PROTO = process.env.FAIRFLEET_PROTO ?? new URL('../../proto', import.meta.url).pathname;
const vectors = JSON.parse(readFileSync(`${PROTO}/vectors/streams.json`, 'utf8'));
const hex = (text) => Buffer.from(text, 'hex');

function floats(text) {
  const data = hex(text);
  return Float32Array.from({ length: data.length / 4 }, (_, i) => data.readFloatLE(4 * i));
}

function modelOf({ parameters, buffers, counters }) {
  const values = [floats(parameters), floats(buffers), counters.map(BigInt)];
  const model = new Model({ 1: values[0].length, 2: values[1].length, 3: values[2].length });
  values.forEach((vector, i) => model.vectors[i + 1].set(vector));
  return model;
}

/** Return the chunk of a vector; its data is the last field of its message. */
function chunkOf(fields) {
  const message = hex(fields.message);
  const data = message.subarray(message.length - fields.bytes);
  return { ...fields, checksum: hex(fields.checksum), data };
}

test('checksums are XXH3-128', () => {
  for (const entry of vectors.checksums) {
    assert.equal(checksum(hex(entry.data)).toString('hex'), entry.checksum);
  }
});

test('streams have their digest, and decode to their model', () => {
  for (const entry of vectors.streams) {
    const digest = new Digest();
    entry.chunks.forEach((chunk) => digest.add({ ...chunk, checksum: hex(chunk.checksum) }));
    assert.equal(digest.value().toString('hex'), entry.digest, entry.of);
    if (!entry.model) continue;
    const expected = modelOf(entry.model);
    const decoder = new Decoder(expected.copy());
    decoder.model.parameters.fill(7);
    entry.chunks.forEach((chunk) => decoder.take(chunkOf(chunk)));
    decoder.finish(hex(entry.digest));
    assert.deepEqual(decoder.model.vectors, expected.vectors);
  }
});

test('a large model is chunked as its digest needs', () => {
  const { large, digest } = vectors.streams.find((entry) => entry.large);
  const model = new Model({ 1: large[0], 2: large[1], 3: large[2] });
  for (const section of [1, 2]) {
    model.vectors[section].forEach((_, i, vector) => (vector[i] = ((i % 251) - 125) / 64));
  }
  model.vectors[3].forEach((_, i, vector) => (vector[i] = BigInt(i - 1000)));
  assert.equal(encode(model).digest.toString('hex'), digest);
});

test('an update is encoded as in the vectors', () => {
  const { received, trained, digest } = vectors.streams.find(
    (entry) => entry.of === 'an update' && entry.codec === 'raw32',
  );
  const update = difference(modelOf(received), modelOf(trained));
  assert.equal(encode(update).digest.toString('hex'), digest);
});

test('int8 decodes to the same bits, and error feedback keeps the rest', () => {
  for (const entry of vectors.error_feedback) {
    const decoded = new Float32Array(300);
    CODECS.int8.decode(hex(entry.data), decoded);
    assert.deepEqual(decoded, floats(entry.decoded));
    const lost = floats(entry.encoded_vector).map((value, i) => value - decoded[i]);
    const after = entry.counts ? lost : floats(entry.residual_before);
    assert.deepEqual(after, floats(entry.residual_after));
  }
});

test('what an update loses is in the next one, if it counts', () => {
  const feedback = new ErrorFeedback();
  const lostBy = (values) => {
    const update = new Model({ 1: values.length });
    update.parameters.set(values);
    const { chunks } = feedback.encode(update, 'int8');
    const decoded = new Float32Array(values.length);
    CODECS.int8.decode(chunks[0].data, decoded);
    return update.parameters.map((value, i) => value - decoded[i]); // with the residual before
  };
  const values = Float32Array.from({ length: 300 }, (_, i) => Math.sin(i));
  const lost = lostBy(values);
  feedback.settle(true);
  const still = new Model({ 1: 300 });
  feedback.encode(still, 'int8');
  assert.deepEqual(still.parameters, lost);
  feedback.settle(false);
  const again = new Model({ 1: 300 });
  feedback.encode(again, 'int8');
  assert.deepEqual(again.parameters, lost);
});

test('batches and steps follow the plan', () => {
  for (const { samples, sizes, ...plan } of vectors.plans.batches) {
    const drawn = [...batches({ ...plan, seed: '18446744073709551615' }, samples)];
    assert.deepEqual(drawn.map((batch) => batch.length), sizes);
  }
  const defaults = { momentum: 0, nesterov: false, weight_decay: 0, proximal_mu: 0 };
  for (const { received, gradients, parameters, ...fields } of vectors.plans.steps) {
    const values = floats(received);
    const plan = { ...defaults, ...fields, solver: fields.solver === 'adam' ? 2 : 1 };
    const solver = new Solver(plan, values);
    gradients.forEach((gradient, step) => {
      solver.step(floats(gradient));
      floats(parameters[step]).forEach((expected, i) => {
        assert.ok(Math.abs(values[i] - expected) <= 1e-5, `${fields.of}: ${values[i]} ${expected}`);
      });
    });
  }
});
