// Downloads of models and uploads of updates, which continue where they broke off.

import { once } from 'node:events';

import grpc from '@grpc/grpc-js';

import { DamagedTransfer, Decoder } from './streams.mjs';
import { Stop, status } from './session.mjs';

const DAMAGED_TRANSFERS = 3; // of the same model or update; then the connection is not the cause

/** The server does not want this update or this task any more. */
export class NotWanted extends Error {}

/** The server refuses the update as wrong: the task has failed. */
export class UpdateRefused extends Error {}

/** Fetch the model of a ModelRef into `model`. */
export async function fetchModel(session, ref, model) {
  let decoder = new Decoder(model);
  for (let damaged = 0; ; ) {
    try {
      await session.repeat((id) => fetchRest(session.stub, id, ref, decoder));
      decoder.finish(ref.digest);
      return;
    } catch (error) {
      if (error.code === status.NOT_FOUND) throw new NotWanted(error.details);
      const isDamaged = error instanceof DamagedTransfer || error.code === status.OUT_OF_RANGE;
      if (!isDamaged || ++damaged === DAMAGED_TRANSFERS) throw error;
      decoder = new Decoder(model); // begin at 0
    }
  }
}

async function fetchRest(stub, session, ref, decoder) {
  const request = { session, version: ref.version, offset_bytes: decoder.offsetBytes };
  const call = stub.FetchModel(request);
  try {
    for await (const chunk of call) decoder.take(chunk);
  } catch (error) {
    call.cancel();
    throw error;
  }
}

/** Send an update, and return its receipt. `announcement` has the fields of OpenUploadRequest. */
export async function upload(session, announcement, chunks) {
  for (let damaged = 0; ; ) {
    const opened = await open(session, announcement);
    if (opened.receipt) return opened.receipt;
    try {
      return await send(session.stub, opened, chunks);
    } catch (error) {
      damaged += [status.DATA_LOSS, status.OUT_OF_RANGE].includes(error.code);
      if (damaged === DAMAGED_TRANSFERS) throw new NotWanted(error.details);
      await recover(session, error);
    }
  }
}

async function open(session, announcement) {
  try {
    return await session.call('OpenUpload', announcement);
  } catch (error) {
    throw refusal(error);
  }
}

/** Prepare to open the upload again; throw if that does not help. */
async function recover(session, error) {
  const isStanding = error.metadata?.get('fairfleet-standing-bin').length > 0;
  const opensAgain = [status.DATA_LOSS, status.OUT_OF_RANGE, status.FAILED_PRECONDITION];
  if (opensAgain.includes(error.code) && !isStanding) {
    await session.backOff();
    return;
  }
  try {
    await session.recover(error);
  } catch (final) {
    throw refusal(final);
  }
}

function refusal(error) {
  if (error instanceof Stop) return error;
  if (error.code === status.INVALID_ARGUMENT) return new UpdateRefused(error.details);
  const notWanted = [status.FAILED_PRECONDITION, status.RESOURCE_EXHAUSTED];
  return notWanted.includes(error.code) ? new NotWanted(error.details) : error;
}

/** Send the chunks from the server's offset on, and return the receipt. */
async function send(stub, opened, chunks) {
  const metadata = new grpc.Metadata();
  metadata.set('fairfleet-upload-bin', opened.upload);
  let call;
  const answered = new Promise((resolve, reject) => {
    call = stub.SendUpload(metadata, (error, answer) => {
      if (error) reject(error);
      else resolve(answer.receipt);
    });
  });
  answered.catch(() => {}); // it is awaited below, perhaps after it failed
  const offset = Number(opened.offset_bytes);
  for (const chunk of chunks) {
    if (chunk.offset_bytes < offset) continue;
    // A server that ends the call reads no further.
    if (!call.write(chunk)) await Promise.race([once(call, 'drain'), answered]);
  }
  call.end();
  return answered;
}
